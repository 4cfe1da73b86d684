"""Deleting: what is older than the newest N, and what dead saves left behind."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from stretto.checkpoint.names import hidden_name, list_checkpoints, list_hidden, step_of
from stretto.checkpoint.points import OnPoint, no_point
from stretto.checkpoint.reader import open_checkpoint
from stretto.errors import CheckpointError


def prune(
    folder: Path, step: int, keep: int, token: str, on_point: OnPoint = no_point, pinned: int | None = None
) -> None:
    """Keeps ``keep`` whole checkpoints: the one of ``step``, just committed, and the newest before it.

    That of the step ``pinned`` stays besides, where it is not among them.
    One that is not older than ``step`` is never touched. A damaged one does not count as kept, so that the
    last good one stays. Each is hidden by a rename first: a death half-way leaves no half checkpoint under
    its name.
    """
    kept = 1
    for path in list_checkpoints(folder):
        older = step_of(path)
        if older is None or older >= step:
            continue
        if kept < keep:
            kept += _is_whole(path)
            continue
        if older == pinned:
            continue
        hidden = folder / hidden_name(older, "pruned", token)
        path.rename(hidden)
        on_point("prune-hidden")
        shutil.rmtree(hidden)


def sweep(folder: Path, step: int | None = None) -> list[str]:
    """Deletes what dead saves left: unfinished up to ``step`` (None: all), replaced, half-deleted ones.

    A running save of a *later* step is never touched: another member may already be writing it. With
    ``step=None`` nobody may be saving; that is for the start of a run, before its workers. Returns the
    names deleted.
    """
    swept = []
    committed = {step_of(path) for path in list_checkpoints(folder) if not path.name.startswith(".")}
    for hidden in list_hidden(folder):
        if hidden.kind == "partial":
            stale = step is None or hidden.step <= step
        else:
            # A replaced folder is the only one of its step until the new one has its name.
            stale = hidden.kind == "pruned" or hidden.step in committed
        if stale:
            shutil.rmtree(hidden.path, ignore_errors=True)
            swept.append(hidden.path.name)
    return swept


def _is_whole(path: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        open_checkpoint(path)
        return True
    return False
