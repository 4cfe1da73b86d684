"""What a step works with in one membership epoch, and the way of samples through the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from stretto.comm.group import Group
from stretto.data import fetch, seed_everything, to_device
from stretto.mistakes import whole_parameters_only
from stretto.parallel import Applied, BoundOptimizer
from stretto.precision import COMPUTE, computing
from stretto.sync import Sync
from stretto.task import Task


@dataclass(frozen=True)
class Machinery:
    """What a step works with, made anew for each membership epoch."""

    group: Group
    applied: Applied
    sync: Sync
    optimizer: BoundOptimizer
    schedule: LRScheduler | None


def forward(
    task: Task, on: Machinery, dataset: Dataset[Any], ids: tuple[int, ...], epoch: int | str, seed: int
) -> tuple[Any, Any]:
    """The model's output for the samples ``ids`` and the samples themselves, on the group's device.

    Random numbers that the forward draws are keyed by ``seed``. Every rank must call it, as layouts communicate inside.
    """
    samples = to_device(fetch(dataset, ids, task.collate, task.recipe.seed, epoch), on.group.device)
    arguments, keywords = task.inputs(samples, on.applied.module.forward)
    dtype = COMPUTE[task.recipe.precision]
    seed_everything(seed)
    with computing(task.recipe.precision), whole_parameters_only():
        output = on.applied.module(
            *to_device(arguments, on.group.device, dtype), **to_device(keywords, on.group.device, dtype)
        )
    return output, samples
