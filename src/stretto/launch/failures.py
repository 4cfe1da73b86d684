"""Bad ends: how a process tells of its own, and how the launcher reads one from what it heard and the exit status."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from stretto.elastic.failure import Failure
from stretto.errors import LaunchError, PeerLost, UserError, one_line
from stretto.launch.limits import out_of_files
from stretto.mistakes import users_frames


def describe(error: BaseException, coordinates: str = "") -> dict[str, Any]:
    """The message in which a process tells what ended it: ``text`` for the terminal, ``whole`` for the log."""
    whole = ""
    if isinstance(error, UserError):
        user, text, code = True, one_line(error), error.exit_code
    elif isinstance(error, SystemExit):
        user, text, code = False, *_of_exit(error)
    elif (line := out_of_files(error)) is not None:
        user, text, code, whole = True, line, LaunchError.exit_code, _formatted(error)
    else:
        user, code = False, 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        whole = _formatted(_without_our_frames(error))
        text = _formatted(_from_the_users_frames(error))
    return {
        "kind": "failed",
        "user": user,
        "text": text,
        "whole": whole or text,
        "exit_code": code,
        "time": time.monotonic(),
        "consequence": any(_of_lost_peer(link) for link in _chain(error)),
        "coordinates": coordinates,
    }


def judge(
    member: str, rank: int | None, status: int, ended_at: float, word: Mapping[str, Any] | None
) -> Failure | None:
    """A process's end, from its last word (a ``done`` or ``failed`` message, or none) and its exit status.

    Returns None for a good end: it said ``done``, and ended with 0.
    """
    if word is not None and word["kind"] == "failed":
        kind = "user" if word["user"] else "program"
        return Failure(
            member,
            rank,
            "user" if kind == "user" else "program",
            word["text"],
            word["exit_code"],
            coordinates=word["coordinates"],
            time=word["time"],
            consequence=word["consequence"],
        )
    if status == 0 and word is not None:
        return None
    who = member if rank is None else f"member {member} (rank {rank})"
    if status < 0:
        text = f"{who} was killed by signal {-status} ({_name(-status)})"
        if -status == signal.SIGKILL:
            text += "; the kernel's out-of-memory killer is a possible cause"
        return Failure(member, rank, "signal", text, 128 - status, time=ended_at)
    text = f"{who} ended with exit code {status} before its work was done"
    return Failure(member, rank, "program", text, status or 1, time=ended_at)


def _of_exit(error: SystemExit) -> tuple[str, int]:
    """sys.exit(n) keeps its code; sys.exit("text") prints the text and means 1, as in any program."""
    if error.code is None or isinstance(error.code, int):
        return f"sys.exit({error.code}) was called", (error.code or 1) & 0xFF or 1
    return str(error.code), 1


def _of_lost_peer(link: BaseException) -> bool:
    """Ours, or what torch raises where the user's code calls it itself."""
    return isinstance(link, PeerLost) or (isinstance(link, RuntimeError) and "gloo/transport" in str(link))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def _without_our_frames(error: BaseException) -> BaseException:
    """The first frames are ours and say nothing; the traceback begins where the entry does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _from_the_users_frames(error: BaseException) -> BaseException:
    """What led from the engine to the user's code helps nobody mend it; the log keeps the whole."""
    first = next(users_frames(error.__traceback__), None)
    return error if first is None else error.with_traceback(first)


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"real-time signal {number}"
