"""What the workers of a plan do: train a few steps under a witness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from stretto.assemble import assemble, build_template, disassemble
from stretto.comm.group import Group, Rendezvous
from stretto.data import Position, Sampler
from stretto.errors import PlanError
from stretto.launch import WorkerContext
from stretto.launch.job import resolve
from stretto.parallel import Template
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task, load_task
from stretto.verify.facts import RankFacts
from stretto.verify.feed import Feed, WatchedDataset, WatchedFeeder, WatchedSync
from stretto.verify.recorded import Recorded
from stretto.verify.witness import Witness

Payload = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """What the workers of one host share."""

    task: Task
    template: Template
    dataset: Dataset[Any]


def prepare(payload: Payload, report: Callable[[Payload], None]) -> Prepared:
    """Builds the model and the data, once a host."""
    task = load_task(payload["task"], payload["sets"])
    return Prepared(task, build_template(task), task.data()["train"])


def work(payload: Payload, context: WorkerContext) -> Payload:
    """A worker's entry. Returns ``{"facts": ..., "notes": ...}``, or ``{"refused": why}`` where it refuses the plan.

    ``payload["plant"]`` may name functions ``module:function``, with commas between them, that are called with the rank
    first: faults to be found, planted in this process only.
    """
    plan = Plan.parse(payload["plan"])
    context.coordinates = plan.mesh.describe(context.rank)
    for planted in filter(None, (payload["plant"] or "").split(",")):
        resolve(planted)(context.rank)
    try:
        facts, notes = _train(plan, payload, context)
        return {"facts": facts.to_json(), "notes": list(notes)}
    except PlanError as error:
        return {"refused": str(error)}


def _train(plan: Plan, payload: Payload, context: WorkerContext) -> tuple[RankFacts, tuple[str, ...]]:
    prepared: Prepared = context.prepared
    task, epoch = prepared.task, context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    context.control.on_break(group.break_)
    feed = Feed()
    machinery = assemble(task, plan, prepared.template, group, dataset=prepared.dataset)
    machinery = dataclasses.replace(machinery, sync=WatchedSync(machinery.sync, feed))
    recorded = Recorded(Path(payload["folder"]))
    witness = Witness(recorded, machinery, feed)
    witness.begin()
    dataset = WatchedDataset(prepared.dataset, feed)
    # Without loaders: what is fetched is watched in this process.
    stepper = Stepper(task, plan, WatchedFeeder(dataset, task, feed), machinery, witness)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())
    for batch in islice(batches, len(recorded.record.steps)):
        stepper.step(batch)
    facts, notes = witness.facts(), machinery.applied.notes
    disassemble(machinery)
    return facts, notes
