"""The command ``stretto``: how it starts, and how a mistake is told in one line."""

from __future__ import annotations

import os
import signal
import sys
import threading

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

# Only what Python itself has loaded by now is imported above: a Ctrl-C that comes before main() ends in a traceback.


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C, else the command's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if threading.current_thread() is not threading.main_thread():
        return _run(given)
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        code = _run(given)
    except BaseException:  # modules that are being loaded make other errors of it
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    return _mistake("interrupted", INTERRUPTED_EXIT_CODE) if interrupted else code


def _run(given: list[str]) -> int:
    from stretto.cli.app import app
    from stretto.errors import UserError, one_line

    try:
        code = app(given, prog_name="stretto", standalone_mode=False)
    except UserError as error:
        return _mistake(one_line(error), error.exit_code)
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _mistake(f"{where}{error.strerror or one_line(error)}", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _mistake(_usage_line(error), USAGE_EXIT_CODE, teller="")
    return code if isinstance(code, int) else 0


def _mistake(line: str, exit_code: int, teller: str = "stretto: ") -> int:
    sys.stdout.flush()
    print(f"{teller}{line}", file=sys.stderr)
    return exit_code


def _usage_line(error: Exception) -> str:
    """Typer's word on a wrong command line, as one line with the nearest valid name and where to read more.

    Typer may bring its own click or use the installed one, so its errors are known by what they hold.
    """
    from stretto.errors import nearest, one_line

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "stretto"
    if option := getattr(error, "option_name", ""):
        valid = [name for parameter in context.command.params for name in parameter.opts] if context else []
        if hasattr(error, "possibilities") and option not in valid:  # of options that there aren't; others lack a value
            return f"{command}: no option {option}{nearest(option, valid)} (see `{command} --help`)"
    line = one_line(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
    return f"{command}: {line[:1].lower()}{line[1:]} (see `{command} --help`)"


if __name__ == "__main__":
    sys.exit(main())
