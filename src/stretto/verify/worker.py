"""What the workers of a plan do: train a few steps under a witness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from stretto.assemble import assemble, build_template, disassemble
from stretto.comm.group import Group, Rendezvous
from stretto.data import Position, Sampler
from stretto.errors import PlanError
from stretto.graph.assignment import Assignment
from stretto.launch import WorkerContext
from stretto.launch.job import resolve
from stretto.parallel import Template
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task, load_task
from stretto.verify.feed import Feed, WatchedDataset, WatchedFeeder, WatchedSync
from stretto.verify.locate import Locator, Watchable
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
    """A worker's entry. Returns ``facts``, ``seen``, ``assignment`` and ``notes``, or ``refused``, why the plan is.

    ``payload["plant"]`` may name functions ``module:function``, with commas between them, that are called with the rank
    first: faults to be found, planted in this process only. ``payload["look"]`` may be a step, the last one
    that is taken, and a bound: every operation of the step is looked at, and ``seen`` is the first that is off by more.
    Then ``payload["assignment"]`` has what was returned as such before: the stages are to be the same, not measured
    anew.
    """
    plan = Plan.parse(payload["plan"])
    context.coordinates = plan.mesh.describe(context.rank)
    for planted in filter(None, (payload["plant"] or "").split(",")):
        resolve(planted)(context.rank)
    try:
        return _train(plan, payload, context)
    except PlanError as error:
        return {"refused": str(error)}


def _train(plan: Plan, payload: Payload, context: WorkerContext) -> Payload:
    prepared: Prepared = context.prepared
    task, epoch = prepared.task, context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    context.control.on_break(group.break_)
    feed = Feed()
    given = payload.get("assignment")
    cut = None if given is None else Assignment.from_json(given)
    machinery = assemble(task, plan, prepared.template, group, dataset=prepared.dataset, assignment=cut)
    machinery = dataclasses.replace(machinery, sync=WatchedSync(machinery.sync, feed))
    recorded = Recorded(Path(payload["folder"]), cut_inside=plan.tp > 1)
    witness = Witness(recorded, machinery, feed)
    witness.begin()
    dataset = WatchedDataset(prepared.dataset, feed)
    # Without loaders: what is fetched is watched in this process.
    stepper = Stepper(task, plan, WatchedFeeder(dataset, task, feed), machinery, witness)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())
    look: tuple[int, float] | None = payload.get("look")
    applied = cast(Watchable, machinery.applied)  # where it is cut
    locator = None if look is None else Locator(recorded, *look)
    for batch in islice(batches, look[0] if look else len(recorded.record.steps)):
        if locator is not None and look is not None and batch.step == look[0]:
            applied.watch(locator)
        stepper.step(batch)
    seen = None if locator is None or locator.first is None else dataclasses.asdict(locator.first)
    kept = applied.assignment.to_json() if plan.traced else None
    facts, notes = witness.facts().to_json(), list(machinery.applied.notes)
    found = {"facts": facts, "seen": seen, "assignment": kept, "notes": notes}
    disassemble(machinery)
    return found
