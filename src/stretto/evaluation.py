"""Evaluation: totals over a whole split, exact on every plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from stretto.data import Generators, cut, derive_seed
from stretto.errors import TaskError
from stretto.machinery import Machinery, fetch_samples, forward
from stretto.plan import Plan
from stretto.precision import computing
from stretto.task import Task


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; training mode and the generators as they were afterwards."""
    before, generators = module.training, Generators.remember()
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(before)
        generators.restore()


def evaluate(task: Task, plan: Plan, on: Machinery, dataset: Dataset[Any]) -> dict[str, tuple[float, float]]:
    """Totals (sum, weight) of the loss and of every metric over the whole dataset, exact on every plan.

    The dataset is cut into global batches and these over the ranks, like training; nothing is padded, dropped or
    counted twice. Every rank must call it; all get the same totals.
    """
    recipe = task.recipe
    size = recipe.eval_batch or recipe.batch
    totals: dict[str, torch.Tensor] = {}
    terms: dict[str, None] = {}
    on.applied.refresh()
    with evaluating(on.applied.module):
        for first in range(0, len(dataset), size):  # type: ignore[arg-type]
            ids = range(first, min(first + size, len(dataset)))  # type: ignore[arg-type]
            for piece in cut(ids, plan.dp, 1, on.group.rank):
                with on.applied.microbatch(last=True, ghost=piece.ghost), on.group.guard():
                    seed = derive_seed(recipe.seed, "evaluate", first + piece.first)
                    samples = fetch_samples(task, on, dataset, piece.ids, "evaluate")
                    output = forward(task, on, samples, seed)
                with computing(recipe.precision, on.group.device.type):
                    losses = task.losses(output, samples)
                    terms |= dict.fromkeys(losses)
                    pairs = {**losses, **task.metrics(output, samples)}
                for name, (total, weight) in pairs.items():
                    into = totals.setdefault(name, torch.zeros(2, dtype=torch.float64))
                    if not piece.ghost:
                        into += torch.stack([total.double().cpu(), weight.double().cpu()])
    names = list(dict.fromkeys(name for found in on.group.gather_json(list(totals)) for name in found))
    if not names:
        raise TaskError("task: the split to evaluate is empty; data() must give it a sample, or leave it out")
    nothing = torch.zeros(2, dtype=torch.float64)
    table = torch.stack([totals.get(name, nothing) for name in names])
    on.group.all_reduce(table)
    found = {name: (float(row[0]), float(row[1])) for name, row in zip(names, table, strict=True)}
    if "loss" in found:
        return found
    means = [found[name][0] / found[name][1] for name in terms if found[name][1]]
    return {"loss": (sum(means), 1.0 if means else 0.0), **found}
