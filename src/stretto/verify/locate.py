"""Where forward parts from one device: of a plan that has failed, one step once more, each operation looked at.

Each rank of ``tp`` and ``pp`` runs stretches of the model's traced graph on parts of its tensors. So it can run the
whole graph beside them, by itself, with the weights of one device's files and the random numbers that its microbatch
begins with, and compare what every operation gave. Nothing is sent for it; what other ranks send goes on as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import fx

from stretto.data import Generators
from stretto.graph.assignment import Assignment
from stretto.graph.trace import Traced
from stretto.parallel.program import Looker, Program
from stretto.state import Box, Part
from stretto.verify import compare
from stretto.verify.facts import Sighting
from stretto.verify.recorded import Recorded

MODEL: Final = "model/"


class Watchable(Protocol):
    """A layout that can be looked at while it trains; ``assignment`` says which stages it has."""

    assignment: Assignment

    def watch(self, looker: Looker | None) -> None:
        """From now on ``looker`` is shown what training computes, until another one is, or None."""


class Locator:
    """A :class:`~stretto.parallel.program.Looker` at one step of one rank.

    Args:
        bound: a value that is off by more, relative to the largest of its tensor, is another one.
    """

    def __init__(self, recorded: Recorded, step: int, bound: float) -> None:
        self._recorded, self._step, self._bound = recorded, step, bound
        self._program: Program | None = None
        self._at: tuple[Program, int] | None = None
        self._values: dict[fx.Node, torch.Tensor] = {}
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}  # after each microbatch
        self._order: dict[fx.Node, int] = {}
        self.first: Sighting | None = None

    def enter(self, stage: int, microbatch: int, program: Program, given: Sequence[torch.Tensor]) -> None:
        """See :class:`Looker`; one device's values of the same microbatch."""
        if self._at == (program, microbatch):
            return
        self._at, traced = (program, microbatch), program.stages.traced
        before = Generators.remember()
        try:
            with torch.no_grad():
                one = _OneDevice(traced)
                held = [self._held(traced, node, given, microbatch) for node in _placeholders(traced)]
                found = one.run(*held)
        finally:
            before.restore()
        buffers = {traced.buffers[n.name]: value for n, value in zip(_placeholders(traced), held, strict=True)
                   if n.name in traced.buffers}  # fmt: skip
        self._buffers[microbatch] = {**buffers, **dict(zip(traced.mutated, found, strict=False))}
        self._values = one.values
        self._order = {node: place for place, node in enumerate(traced.graph.graph.nodes)}

    def _held(self, traced: Traced, node: fx.Node, given: Sequence[torch.Tensor], microbatch: int) -> torch.Tensor:
        if node.name in traced.arguments:
            return given[traced.arguments.index(node.name)].clone()
        if node.name in traced.constants:
            return traced.constants[node.name].clone()
        name = {**traced.parameters, **traced.buffers}[node.name]
        if (after := self._buffers.get(microbatch - 1, {}).get(name)) is not None:
            return after.clone()
        shape = tuple(node.meta["val"].shape)
        full = MODEL + name
        if full not in self._recorded.names(self._step - 1):
            raise RuntimeError(f"{full} is not among one device's tensors")
        values = self._recorded.read(self._step - 1, full, Box.whole(shape))
        device = given[0].device if given else values.device
        return values.to(device, node.meta["val"].dtype, copy=True)

    def see(self, node: fx.Node, value: Any, arrived: bool) -> None:
        """See :class:`Looker`; remembers the earliest operation whose value is another."""
        assert self._at is not None
        program, microbatch = self._at
        traced, theirs = program.stages.traced, self._values.get(node)
        name = {**traced.parameters, **traced.buffers}.get(node.name, "")
        if theirs is None or not isinstance(value, torch.Tensor) or (node.op == "placeholder" and not name):
            return
        part = program.localizer.part_of(node)
        if part is not None and (name or value.shape != theirs.shape):
            theirs = _cut(theirs, part)
        if value.shape == theirs.shape:
            rel = compare.relative(compare.gap(value, theirs), compare.magnitude([theirs]))
        else:
            rel = compare.FURTHEST
        if rel <= self._bound:
            return
        seen = Sighting(
            place=self._order[node],
            kind="parameter" if name else "arrived" if arrived else "made",
            name=name or ("loss()" if node in (traced.loss or ()) else module_of(node)),
            operation="" if name else operation_of(node),
            microbatch=microbatch,
            by=rel,
        )
        if self.first is None or seen.order < self.first.order:
            self.first = seen


class _OneDevice(fx.Interpreter):
    """Runs the whole graph and keeps what every operation gave, as it was then: some are changed in place later."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.graph)
        self.values: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.values[n] = value.detach().clone()
        return value


def _placeholders(traced: Traced) -> list[fx.Node]:
    return [node for node in traced.graph.graph.nodes if node.op == "placeholder"]


def _cut(whole: torch.Tensor, part: Part) -> torch.Tensor:
    pieces = [whole[box.within(Box.whole(tuple(whole.shape)))] for box in part.boxes]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)


def module_of(node: fx.Node) -> str:
    """The innermost module in whose forward an operation was traced; empty for the model's own."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.partition("model")[2].lstrip(".")


def operation_of(node: fx.Node) -> str:
    """What a person would call it: ``linear``, not ``aten.linear.default``."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else getattr(node.target, "__name__", str(node))
