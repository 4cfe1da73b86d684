"""Whose mistake an exception is: the user's frames in a traceback, and the few errors that one line tells whole."""

from __future__ import annotations

import ast
import linecache
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from stretto.errors import Refused, UserError, nearest, one_line

_INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NOT_THEIRS: Final = (str(Path(__file__).parent), *_INSTALLED, "<")
FACTORIES: Final = frozenset({"model", "data", "optimizer", "schedule"})


def users_frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    """The parts of a traceback that are the user's."""
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            yield trace
        trace = trace.tb_next


def is_users(file: str) -> bool:
    """Whether a file of code is neither ours, nor Python's, nor an installed package's."""
    return not file.startswith(_NOT_THEIRS)


def in_one_line(error: Exception, function: str, arguments: tuple[Any, ...], given: Mapping[str, Any]) -> str | None:
    """What a task's ``function(*arguments)`` did wrong, where one line says all that its traceback would; else None.

    Args:
        given: those of its settings that came from ``--set``.
    """
    if isinstance(error, UserError):
        return None
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, KeyError) and arguments and isinstance(arguments[-1], Mapping):
        return _missing_entry(error, function, arguments[-1])
    frames = list(users_frames(error.__traceback__))
    if function in FACTORIES and given and len(frames) == 1:
        told = " ".join(f"--set {key}={value}" for key, value in given.items())
        problem = f"{type(error).__name__}: {one_line(error)} ({_place(frames[0])})"
        return f"task: {function}() does not work with {told}: {problem}"
    return None


@contextmanager
def whole_parameters_only() -> Iterator[None]:
    """Surrounds forward, loss or backward. Of a parameter that lies there in shards torch speaks in its own types.

    Raises:
        Refused: the model reads a parameter outside of the module that it belongs to.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        *_, last = (None, *users_frames(error.__traceback__))
        place = f" ({_place(last)})" if last is not None else ""
        raise Refused(
            f"plan: the model reads a parameter without calling the module that it belongs to{place}, and so gets a "
            "shard of it; call that module, or use zero=0"
        ) from error


@contextmanager
def second_forward(recompute: str) -> Iterator[None]:
    """Surrounds backward, where layers are computed again if ``recompute`` says so.

    Raises:
        Refused: a layer does something else the second time, as torch found by what it saves.
    """
    try:
        yield
    except RuntimeError as error:
        known = ("torch.utils.checkpoint", "recompute=selective keeps", "by an inplace operation")
        if recompute == "none" or not any(sign in str(error) for sign in known):
            raise
        raise Refused(
            f"plan: recompute={recompute}: a layer can't be computed a second time in backward as it was in forward "
            f"({one_line(error)}): does it take other ways from call to call, or change in place what it has computed? "
            f"Use {'recompute=full or ' if recompute == 'selective' else ''}recompute=none"
        ) from error


def missing_module(error: ModuleNotFoundError) -> str:
    """A line for an import of what isn't there, with the place in the user's code that led to it."""
    *_, last = (None, *users_frames(error.__traceback__))
    place = f"{_place(last)}: " if last is not None else ""
    return f"task: {place}{one_line(error)}; install it, or put it beside the task"


def _place(trace: TracebackType) -> str:
    return f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"


def _missing_entry(error: KeyError, function: str, batch: Mapping[Any, Any]) -> str | None:
    """A line for a batch that was asked for an entry that it lacks; None where something else lacked the key."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not error.args or error.args[0] in batch:
        return None
    summary = traceback.extract_tb(trace, limit=1)[0]
    if _indexed(summary, trace.tb_frame) is not batch:
        return None
    key = error.args[0]
    what, names = "totals" if function == "summarize" else "batch", ", ".join(map(str, batch))
    return f"task: {function}() asked the {what} for {key!r}; it has: {names}{nearest(str(key), map(str, batch))}"


def _indexed(summary: traceback.FrameSummary, frame: FrameType) -> Any:
    """The value of NAME where the code that was running is ``NAME[...]``, else None."""
    if summary.colno is None or summary.end_colno is None or summary.lineno != summary.end_lineno:
        return None
    line = linecache.getline(summary.filename, summary.lineno or 0).encode()
    try:
        found = ast.parse(line[summary.colno : summary.end_colno].decode(), mode="eval").body
    except SyntaxError:
        return None
    name = found.value.id if isinstance(found, ast.Subscript) and isinstance(found.value, ast.Name) else ""
    return frame.f_locals.get(name)
