"""Where a thread stands, read from its frames: the line that a person looks for, and whether it waits for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Final

from stretto.mistakes import is_users

_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + "/"
_SAVING: Final = "checkpoint/writer.py"
# Files of ours in which nothing takes long but waiting for other members.
_WAITING: Final = ("comm/", "sync/", _SAVING)
_NAMES: Final = MappingProxyType({"sync": "the reduction of gradients", "checkpoint": "the saving of a checkpoint"})
_VOTE: Final = ("step.py", "_vote")  # on an accelerator the call returns at once, and reading its result waits


@dataclass(frozen=True)
class Stand:
    """Where a thread stands.

    Args:
        place: ``file:line in function``: the user's innermost line, else ours.
        waits_in: what it waits in for other members, by name; empty where it doesn't.
        loads: it waits for its loaders.
        saves: it waits for a checkpoint.
    """

    place: str
    waits_in: str = ""
    loads: bool = False
    saves: bool = False


def stand(frame: FrameType) -> Stand:
    """Where the thread with the innermost ``frame`` stands."""
    frames = list(_outward(frame))
    ours = [each for each in frames if _file(each).startswith(_PACKAGE)]
    users = [each for each in frames if is_users(_file(each))]
    # Below the engine's own lines a helper of the group's says less than who called it.
    telling = [each for each in ours if not _own(each).startswith("comm/")]
    own = _own(ours[0]) if ours else ""
    here = next(iter((*telling, *ours, frame)))
    place = _place(here)
    if users:  # the line that a person looks for, and where that call has led to
        place = _place(users[0]) + (f" (there {place})" if ours and frames.index(here) < frames.index(users[0]) else "")
    return Stand(place, _waits_in(frames), own == "data/loader.py", own == _SAVING)


def _waits_in(frames: list[FrameType]) -> str:
    """From the innermost frame outward: whether a wait comes before anyone's own work."""
    for frame in frames:
        file, name = _file(frame), frame.f_code.co_name
        if "/torch/distributed/" in file and not file.endswith("c10d_logger.py"):
            return name.lstrip("_")
        if file.startswith(_PACKAGE):
            own = _own(frame)
            waits = own.startswith(_WAITING) or (own, name) == _VOTE
            return _NAMES.get(own.partition("/")[0], name.strip("_")) if waits else ""
        if is_users(file):
            return ""
    return ""


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _own(frame: FrameType) -> str:
    """The file's path within the package."""
    return _file(frame).removeprefix(_PACKAGE)


def _place(frame: FrameType) -> str:
    path = Path(_file(frame))
    shown = path
    if _file(frame).startswith(_PACKAGE):
        shown = Path("stretto", _own(frame))
    elif path.is_relative_to(Path.cwd()):
        shown = path.relative_to(Path.cwd())
    return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
