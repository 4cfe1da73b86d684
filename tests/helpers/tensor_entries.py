"""Entries of the tests of ``tp``: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stretto.assemble import assemble, build_template
from stretto.comm.members import Members
from stretto.launch.context import WorkerContext
from stretto.machinery import Machinery, call_of, forward
from stretto.parallel import Call, Roots
from stretto.parallel.faithful import roots_of
from stretto.plan import Plan
from stretto.task import Task, load_task
from stretto.training import form_group


def messages(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """What a training step asks of the tensor group inside the model and its loss, forward and backward: of each
    message its elements. Then what an evaluation does. ``kinds``: the names of all of them."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    dataset = task.data()["train"]
    on = assemble(task, plan, build_template(task), form_group(plan, context), dataset=dataset)
    batch = task.collate([dataset[index] for index in range(task.recipe.batch)])
    sent: list[int] = []
    kinds: list[str] = []
    for name in ("all_reduce", "all_gather", "gather_parts", "reduce_scatter"):
        _count(name, on.applied.ranks.tensor, sent, kinds)
    on.applied.refresh()
    on.applied.module.train()
    counted = _Counted(task, on, batch, sent)
    on.applied.train([counted], lambda **_: nullcontext())
    training = len(sent)
    arguments, keywords = counted.call()
    on.applied.module.eval()
    with torch.no_grad():
        output = on.applied.module(*arguments, **keywords)
    places = counted.forwards
    return {
        "forward": sent[:places],
        "backward": sent[places:training],
        "evaluation": sent[training:],
        "logits": output.numel(),
        "kinds": kinds,
    }


def _count(name: str, members: Members, sent: list[int], kinds: list[str]) -> None:
    honest = getattr(Members, name)

    def counted(self: Members, tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self is members:
            sent.append(tensor.numel())
            kinds.append(name)
        return honest(self, tensor, *more, **named)

    setattr(Members, name, counted)


class _Counted:
    """The microbatch of a step."""

    ghost = False

    def __init__(self, task: Task, on: Machinery, batch: Any, sent: list[int]) -> None:
        self._task, self._on, self.samples, self._sent = task, on, batch, sent
        self.forwards = 0

    def call(self) -> Call:
        return call_of(self._task, self._on, self.samples)

    def forward(self, run: Callable[..., Any]) -> Any:
        return forward(self._task, self._on, run, self.call(), 0)

    def loss(self, output: Any) -> Roots:
        return self.roots(self._task.losses(output, self.samples))

    def roots(self, terms: Any) -> Roots:
        self.forwards = len(self._sent)
        return roots_of(terms)

    def backward(self, roots: Roots) -> None:
        torch.autograd.backward(*roots)

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()


def kept(payload: dict[str, Any], context: WorkerContext) -> int:
    """Bytes that forward of a training step keeps for backward, without parameters."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    dataset = task.data()["train"]
    on = assemble(task, plan, build_template(task), form_group(plan, context), dataset=dataset)
    batch = task.collate([dataset[index] for index in range(task.recipe.batch)])
    on.applied.refresh()
    on.applied.module.train()
    held = {parameter.untyped_storage().data_ptr() for parameter in on.applied.module.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in held:
            found[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        on.applied.train([_Counted(task, on, batch, [])], lambda **_: nullcontext())
    return sum(found.values())


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
