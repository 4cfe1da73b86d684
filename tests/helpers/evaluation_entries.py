"""Entries of the tests of evaluation: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

from typing import Any

import torch

import stretto
from stretto.assemble import assemble, build_template, disassemble
from stretto.comm.group import Group, Rendezvous
from stretto.data import Feeder
from stretto.evaluation import evaluate
from stretto.launch.context import WorkerContext
from stretto.plan import Plan
from stretto.task import load_task


def totals(payload: dict[str, Any], context: WorkerContext) -> list[dict[str, Any]]:
    """The totals under each of the plans, all of this many ranks: floats as they are, tensors as nested lists."""
    task = load_task(payload["task"], payload.get("sets", {}))
    found = []
    for number, text in enumerate(payload["plans"], start=1):
        plan = Plan.parse(text)
        group = Group(Rendezvous(context.epoch.store, number, context.rank, context.world_size))
        on = assemble(task, plan, build_template(task), group)
        feeder = Feeder(task.data()["val"], task.collate, task.recipe.seed)
        parts = evaluate(task, plan, on, feeder)
        found.append({name: _plain(total) for name, total in parts.items()})
        disassemble(on)
    return found


def _plain(total: Any) -> Any:
    if isinstance(total, tuple):
        return [_plain(part) for part in total]
    return total.tolist() if isinstance(total, torch.Tensor) else total


def stop_early(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A loop of its own that ends as soon as an evaluation is no better than the last one: patience 1."""
    run = stretto.start(payload["task"], plan=payload["plan"], settings=payload["sets"], run=payload["run"])
    scores: list[float] = []
    for batch in run.batches():
        run.step(batch)
        scores.append(run.evaluate()["score"])
        if scores[-1] <= max(scores[:-1], default=-1.0):
            break
    run.finish()
    return {"scores": scores}
