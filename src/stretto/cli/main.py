"""The command ``stretto``: its commands, and how a mistake is told in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from stretto.cli.audit import audit_command
from stretto.cli.resume import resume_command
from stretto.cli.run import run_command
from stretto.cli.train import train_command
from stretto.cli.verify import verify_command
from stretto.errors import UserError, nearest, one_line

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # plain help starts in half the time, and reads as well
    invoke_without_command=True,
    help="Train any PyTorch model on any number of devices, with the numbers of one device.",
)
app.command("train")(train_command)
app.command("resume")(resume_command)
app.command("run")(run_command)
app.command("verify")(verify_command)
app.command("audit")(audit_command)


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from stretto import __version__

        print(f"stretto {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 2 for a user's mistake, 130 after Ctrl-C, else the command's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given, prog_name="stretto", standalone_mode=False)
    except UserError as error:
        return _mistake(one_line(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED_EXIT_CODE
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
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "stretto"
    if option := getattr(error, "option_name", ""):
        valid = [name for parameter in context.command.params for name in parameter.opts] if context else []
        if option not in valid:
            return f"{command}: no option {option}{nearest(option, valid)} (see `{command} --help`)"
    line = one_line(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
    return f"{command}: {line[:1].lower()}{line[1:]} (see `{command} --help`)"


if __name__ == "__main__":
    sys.exit(main())
