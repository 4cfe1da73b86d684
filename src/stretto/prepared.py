"""What a run is made of, and where it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.checkpoint import Checkpoint
from stretto.data import Position
from stretto.parallel import Template
from stretto.plan import Plan
from stretto.runfolder import Law
from stretto.task import Task


@dataclass(frozen=True)
class Prepared:
    """What a run is made of, before its group is formed; shared by the workers of a host where one builds it for all.

    Args:
        task: with its settings.
        plan: checked against the task.
        template: the model, built once.
        checkpoint: what to go on from, or None for a new run.
        law: whether the plan keeps the numbers of one device.
    """

    task: Task
    plan: Plan
    template: Template
    checkpoint: Checkpoint | None = None
    law: Law = field(default_factory=Law)


@dataclass(frozen=True)
class RunOptions:
    """Where a run writes, and which start of it this is.

    Args:
        folder: the run folder.
        attempt: counts the starts of this run from 1.
        stop_after: last step to commit in this start, or None to go to the recipe's end.
        forecast: what was predicted; see :class:`stretto.forecast.Forecast`.
    """

    folder: Path
    attempt: int = 1
    stop_after: int | None = None
    forecast: dict[str, Any] | None = None


@dataclass
class Progress:
    """What a checkpoint must hold beside tensors."""

    step: int = 0
    position: Position = field(default_factory=Position)
    samples: int = 0
    loss: float | None = None
    skipped: int = 0
