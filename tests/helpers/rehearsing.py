"""What a plan's ranks really call in a step, to be held against what a rehearsal notes."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from stretto.assemble import assemble, build_template, disassemble, open_data
from stretto.comm.group import Group, Rendezvous
from stretto.comm.line import Line
from stretto.data import Position, Sampler
from stretto.graph.assignment import Assignment
from stretto.launch import WorkerContext
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import load_task

STEPS = 3


def calls(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A worker's entry. Returns the collectives of the last step, and the bytes that it sent to other stages."""
    task, plan, epoch = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"]), context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    sent: list[int] = []
    honest = Line.send

    def send(self: Line, tensor: Any, to: int, tag: int) -> Any:
        sent.append(tensor.nbytes)
        return honest(self, tensor, to, tag)

    Line.send = send  # type: ignore[method-assign]
    feeder = open_data(task, plan, group)["train"]
    cut = None if payload["assignment"] is None else Assignment.from_json(payload["assignment"])
    machinery = assemble(task, plan, build_template(task), group, assignment=cut)
    stepper = Stepper(task, plan, feeder, machinery)
    begun = 0
    for batch in islice(Sampler(len(feeder), task.recipe.batch, task.recipe.seed).batches(1, Position()), STEPS):
        begun = group.under_way()[1]
        sent.clear()
        stepper.step(batch)
    found = {"collectives": group.under_way()[1] - begun, "sent": sent}
    disassemble(machinery)
    return found


def sleeps(payload: dict[str, Any], context: WorkerContext) -> None:
    """Looks at nothing for a minute, once it has said so."""
    context.control.send({"kind": "asleep"})
    time.sleep(60)
