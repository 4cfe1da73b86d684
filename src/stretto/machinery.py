"""What a step works with in one membership epoch, and the way of samples through the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from stretto.comm.group import Group
from stretto.comm.members import Members
from stretto.data import seed_everything, to_device
from stretto.mistakes import whole_parameters_only
from stretto.parallel import Applied, BoundOptimizer, Call
from stretto.precision import COMPUTE, computing, widen
from stretto.sync import Sync
from stretto.task import Task


@dataclass(frozen=True)
class Machinery:
    """What a step works with, made anew for each membership epoch.

    Args:
        notes: choices that were made for the user, to be said; the same on every rank.
    """

    group: Group
    applied: Applied
    sync: Sync
    optimizer: BoundOptimizer
    schedule: LRScheduler | None
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> Members:
        """The ranks that share the global batch, each with samples of its own."""
        return self.applied.ranks.world


def call_of(task: Task, on: Machinery, samples: Any) -> Call:
    """What the model is called with for ``samples``: on the device, in the type that forward computes with."""
    arguments, keywords = task.inputs(samples, on.applied.module.forward)
    dtype = COMPUTE[task.recipe.precision]
    return to_device(arguments, on.group.device, dtype), to_device(keywords, on.group.device, dtype)


def forward(task: Task, on: Machinery, run: Callable[..., Any], call: Call, seed: int) -> Any:
    """The model's output as loss() and metrics() get it: ``run``, mostly the model, on ``call``.

    Random numbers that the forward draws are keyed by ``seed``. Every rank must call it, as layouts communicate inside.
    """
    arguments, keywords = call
    seed_everything(seed)
    with computing(task.recipe.precision, on.group.device.type), whole_parameters_only():
        output = run(*arguments, **keywords)
    return widened(task, output)


def widened(task: Task, output: Any) -> Any:
    """What the model gave as loss() and metrics() get it."""
    return output if COMPUTE[task.recipe.precision].itemsize >= 4 else widen(output)
