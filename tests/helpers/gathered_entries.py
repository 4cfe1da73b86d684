"""Entries of the tests of parameters that are gathered piece by piece: each runs in every worker of a real job."""

from __future__ import annotations

import os
import signal
from typing import Any

import any_plan_entries
from stretto import training
from stretto.assemble import assemble, build_template
from stretto.comm.members import Members
from stretto.data import Feeder, Position, Sampler
from stretto.evaluation import evaluate
from stretto.launch.context import WorkerContext
from stretto.machinery import Machinery
from stretto.parallel.gathered import Visit
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import load_task
from stretto.testing import conditions
from stretto.training import form_group


def lent(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Some steps where no memory can be shared. ``rest``: bytes of parameters on this rank between steps; ``most``:
    bytes of whole ones that were there at once; ``gathers``: messages to gather some in each step; ``pieces`` of each
    stage here; ``whole``: bytes of the logical parameters."""
    conditions.separate_memory(context.rank)
    if payload.get("small", True):
        conditions.small_pieces(context.rank)
    conditions.even_stages(context.rank)
    task, plan = load_task(payload["task"], payload.get("sets", {})), Plan.parse(payload["plan"])
    data = task.data()
    template = build_template(task)
    on = assemble(task, plan, template, form_group(plan, context), dataset=data["train"])
    most, gathers = 0, 0
    world = on.applied._lender._world  # type: ignore[attr-defined]
    honest = Members.gather_parts

    def counted(self: Members, *arguments: Any) -> None:
        nonlocal most, gathers
        honest(self, *arguments)
        gathers += self is world
        most = max(most, held(on, local=False))

    Members.gather_parts = counted  # type: ignore[method-assign]
    feeder = Feeder(data["train"], task.collate, task.recipe.seed)
    stepper = Stepper(task, plan, feeder, on)
    batches = Sampler(len(data["train"]), task.recipe.batch, task.recipe.seed).batches(1, Position())
    rest, steps, losses = [], [], []
    for _ in range(payload.get("num_steps", 2)):
        rest.append(held(on))
        gathers = 0
        losses.append(stepper.step(next(batches)).loss)
        steps.append(gathers)
    gathers = 0
    totals = evaluate(task, plan, on, feeder) if payload.get("evaluates") else {}
    portions = next(iter(on.applied._programs.values())).portions.values()  # type: ignore[attr-defined]
    return {
        "losses": losses,
        "totals": {name: [float(one) for one in pair] for name, pair in totals.items()},
        "rest": [*rest, held(on)],
        "most": most,
        "gathers": steps,
        "evaluation": gathers,
        "pieces": [len(portion.parameters) for portion in portions],
        "buckets": len(on.applied._lender._buckets),  # type: ignore[attr-defined]
        "whole": sum(spec.num_bytes for spec in template.specs.values()),
        "notes": on.notes,
    }


def held(on: Machinery, local: bool = True) -> int:
    """Bytes of the parameters that forward uses, and of what is trained."""
    found = {}
    for place in on.applied.places.values():
        for one in (place.compute, place.local) if local else (place.compute,):
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def apart(payload: dict[str, Any], context: WorkerContext) -> Any:
    """A run as the command line starts it, where no memory can be shared."""
    conditions.separate_memory(context.rank)
    conditions.small_pieces(context.rank)
    return training.work(payload, context)


def resaved(payload: dict[str, Any], context: WorkerContext) -> None:
    """See `any_plan_entries.resaved`."""
    conditions.separate_memory(context.rank)
    any_plan_entries.resaved(payload, context)


def killed(payload: dict[str, Any], context: WorkerContext) -> None:
    """The last rank kills itself between two pieces of its second step; ``where``: ``enter`` (forward) or ``_back``."""
    conditions.separate_memory(context.rank)
    conditions.small_pieces(context.rank)
    task, plan = load_task(payload["task"], {}), Plan.parse(payload["plan"])
    group = form_group(plan, context)
    context.control.on_break(group.break_)
    on = assemble(task, plan, build_template(task), group)
    dataset = task.data()["train"]
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())
    stepper.step(next(batches))
    honest, calls = getattr(Visit, payload["where"]), 0

    def dying(self: Visit, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 and context.rank == plan.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(self, *arguments)

    setattr(Visit, payload["where"], dying)
    for _ in range(3):
        stepper.step(next(batches))
