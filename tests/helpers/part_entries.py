"""Entries of the hazards' tests: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.assemble import assemble, build_template, disassemble
from stretto.checkpoint import CheckpointWriter, Snapshot, open_checkpoint, snapshot_slices
from stretto.comm.group import Group, Rendezvous
from stretto.data import BatchHandle, Feeder, Position, Sampler
from stretto.evaluation import evaluating
from stretto.launch.context import WorkerContext
from stretto.machinery import Machinery
from stretto.parallel.batchnorm import _Normalise
from stretto.plan import Plan
from stretto.state import Box
from stretto.step import Onlooker, Stepper
from stretto.task import Task, load_task

PROBE = torch.linspace(-2, 12, 15).view(5, 3)


class Gradients(Onlooker):
    """Notes each step's gradients of the mean loss, of this rank's parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def reduced(self, step: int, sync: Any, factor: float) -> None:
        """Copies them."""
        found = sync.gradients().items()
        self.steps.append({name: None if g is None else (g * factor).flatten().tolist() for name, g in found})


def _batches(task: Task, length: int, in_order: bool) -> Iterator[BatchHandle]:
    """Global batches; ``in_order``: each takes every n-th sample, smallest id first, so that ranks see other data."""
    for batch in Sampler(length, task.recipe.batch, task.recipe.seed).batches(1, Position()):
        yield (
            replace(batch, ids=tuple(range(0, length, length // len(batch.ids)))[: len(batch.ids)])
            if in_order
            else batch
        )


def _whole(on: Machinery) -> dict[str, list[float]]:
    """Every parameter and buffer, gathered."""
    found = {}
    for piece in on.applied.export_state():
        whole = torch.zeros(piece.spec.shape, dtype=torch.float64)
        if piece.owner:
            whole[piece.box.within(Box.whole(piece.spec.shape))] = piece.data.double()
        on.group.all_reduce(whole)
        found[piece.spec.name.removeprefix("model/")] = whole.flatten().tolist()
    return found


def _answers(task: Task, on: Machinery) -> list[float]:
    """What the model says in evaluation to one input, the same on every rank."""
    on.applied.refresh()
    dtype = {"fp64": torch.float64, "fp32": torch.float32}.get(task.recipe.precision, torch.bfloat16)
    with evaluating(on.applied.module), on.applied.microbatch(last=True, ghost=False):
        answers: list[float] = on.applied.module(PROBE.to(dtype)).double().flatten().tolist()
    return answers


def trained(payload: dict[str, Any], context: WorkerContext) -> list[dict[str, Any]]:
    """Trains under each of ``plans`` in turn, all of this many workers, from the beginning. Returns of each what is
    left in the end, and what a checkpoint of it answers."""
    task = load_task(payload["task"], payload["sets"])
    template, dataset = build_template(task), task.data()["train"]
    found = []
    for index, text in enumerate(payload["plans"]):
        plan = Plan.parse(text)
        group = Group(Rendezvous(context.epoch.store, 2 * index + 1, context.rank, plan.world_size))
        on = assemble(task, plan, template, group)
        noted = Gradients()
        stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on, noted)
        batches = _batches(task, len(dataset), payload.get("in_order", False))
        outcomes = [stepper.step(next(batches)) for _ in range(payload["num_steps"])]
        buffers = {name: buffer.flatten().tolist() for name, buffer in on.applied.module.named_buffers()}
        folder = Path(payload["folder"]) / str(index)
        writer = CheckpointWriter(folder)
        parts = snapshot_slices([*on.applied.export_state(), *on.optimizer.export_state()])
        state = sorted({piece.spec.name.split("/")[2] for piece in on.optimizer.export_state()})
        meta = {"groups": on.optimizer.hyperparameters(), "scalars": on.optimizer.scalars()}
        writer.save(Snapshot(1, "t", context.member, context.epoch.members, context.rank == 0, parts, meta))
        writer.wait()
        on.group.barrier()
        answers, weights, groups = _answers(task, on), _whole(on), on.optimizer.hyperparameters()
        disassemble(on)

        group = Group(Rendezvous(context.epoch.store, 2 * index + 2, context.rank, plan.world_size))
        on = assemble(task, plan, template, group, open_checkpoint(next(folder.glob("step-*"))))
        reloaded = _answers(task, on)
        disassemble(on)
        found.append(
            {
                "plan": text,
                "losses": [outcome.loss for outcome in outcomes],
                "answers": answers,
                "reloaded": reloaded,
                "weights": weights,
                "buffers": buffers,
                "groups": [(group["names"], group["values"]["weight_decay"]) for group in groups],
                "state": state,
                "gradients": noted.steps,
            }
        )
    return found


def normalised(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The gradient of a loss over all ranks by this rank's input to a global BatchNorm: by backward and by finite
    differences. The last rank is a ghost where ``payload["ghost"]`` says so."""
    group = Group(Rendezvous(context.epoch.store, 1, context.rank, context.world_size))
    drawn = torch.Generator().manual_seed(group.rank)
    counts = not (payload["ghost"] and group.rank == group.size - 1)
    x = torch.randn(group.size - group.rank, 2, 3, generator=drawn, dtype=torch.float64) * (1 + group.rank)
    by = torch.randn(x.shape, generator=drawn, dtype=torch.float64) * (1.0 if counts else 0.0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (_Normalise.apply(x, group, counts, 1e-3)[0].sin() * by).sum()  # type: ignore[no-untyped-call]

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()  # type: ignore[no-untyped-call]
    analytic = leaf.grad.flatten()
    numeric = torch.zeros_like(analytic)
    for rank in range(group.size):
        for element in range((group.size - rank) * 6):
            sides = []
            for step in (1e-5, -1e-5):
                moved = x.clone()
                if rank == group.rank:
                    moved.view(-1)[element] += step
                total = loss(moved).reshape(1)
                group.all_reduce(total)
                sides.append(float(total))
            if rank == group.rank:
                numeric[element] = (sides[0] - sides[1]) / 2e-5
    return {"analytic": analytic.tolist(), "numeric": numeric.tolist()}
