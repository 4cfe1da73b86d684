"""Entries of the tests of ``tp``: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

from typing import Any

import torch

from stretto.assemble import assemble, build_template
from stretto.comm.members import Members
from stretto.launch.context import WorkerContext
from stretto.plan import Plan
from stretto.task import load_task
from stretto.training import form_group


def messages(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """How many sums a forward and its backward ask of the tensor group, and of how many elements."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    dataset = task.data()["train"]
    on = assemble(task, plan, build_template(task), form_group(plan, context), dataset=dataset)
    batch = task.collate([dataset[index] for index in range(task.recipe.batch)])
    arguments, keywords = task.inputs(batch, on.applied.module.forward)
    on.applied.refresh()
    sent: list[int] = []
    honest = Members.all_reduce

    def counted(self: Members, tensor: torch.Tensor, async_op: bool = False) -> Any:
        if self is on.applied.ranks.tensor:
            sent.append(tensor.numel())
        return honest(self, tensor, async_op)

    Members.all_reduce = counted  # type: ignore[method-assign]
    output = on.applied.module(*arguments, **keywords)
    forward = len(sent)
    total, _ = task.losses(output, batch)["loss"]
    total.backward()  # type: ignore[no-untyped-call]
    return {"forward": forward, "backward": len(sent) - forward, "elements": sorted(set(sent))}


def parts(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Elements of the parameters that are cut and of those that aren't: logical ones, and those held here."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    on = assemble(task, plan, build_template(task), form_group(plan, context))
    found: dict[str, Any] = {"cut": 0, "held": 0, "whole": 0, "kept": 0, "names": []}
    for name, place in on.applied.places.items():
        found["cut" if place.cut else "whole"] += place.spec.numel
        found["held" if place.cut else "kept"] += place.compute.numel()
        found["names"] += [name] if place.cut else []
    return found
