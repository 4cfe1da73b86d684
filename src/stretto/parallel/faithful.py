"""Whether a traced graph computes what the model does, by running both once, forward and backward.

A graph has the operations that ran while it was traced. What a model does beside them is not in it: a backward of its
own (``autograd.Function``), hooks on gradients, a count that Python keeps from call to call. Such a model would train
under other numbers, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from stretto.data import Generators, tensors_in
from stretto.errors import one_line
from stretto.graph.trace import Traced, filled
from stretto.parallel._base import Example, Roots

NEEDED: Final = 4  # times the parameters: the model's, copies of them, gradients, and something for activations
# Of the largest: far over rounding, and far under what a hook or a backward of one's own is there for.
TOLERANCES: Final[Mapping[torch.dtype, float]] = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-3})
COARSE: Final = 0.1
_START: Final = "the model can't be cut, as a trace of it computes something else: "
_LOSS: Final = "a trace of the model and its loss computes something else: "


def roots_of(terms: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Roots:
    """Where backward of the terms of a loss begins."""
    totals = [total for total, _ in terms.values() if total.requires_grad]
    return totals, [torch.ones_like(total) for total in totals]


@dataclass(frozen=True)
class _Ran:
    output: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def unlike(
    traced: Traced, module: nn.Module, values: nn.Module, example: Example, free: int | None
) -> tuple[str, str]:
    """Why the graph isn't the model, or nothing; and a note where that can't be told.

    Args:
        module: a copy of the model whose tensors are to be filled; of no other use afterwards.
        values: what they are filled with.
        free: bytes of memory that there are.
    """
    needed = NEEDED * sum(one.numel() * one.element_size() for one in module.parameters())
    if free is not None and needed > free:
        return "", unchecked(f"that takes {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free")
    before = Generators.remember()
    try:
        return _Both(traced, module, values, example).compare(), ""
    finally:
        before.restore()


def unchecked(why: object) -> str:
    """The note where it can't be told."""
    return f"whether the traced graph computes what the model does was not checked, as {why}; `stretto verify` tells"


class _Both:
    def __init__(self, traced: Traced, module: nn.Module, values: nn.Module, example: Example) -> None:
        self._traced, self._module, self._example = traced, module.train(), example
        self._start = Generators.remember()
        own = {**dict(values.named_parameters()), **dict(values.named_buffers())}
        self._buffers = {name: own[name].detach().to(one.device, one.dtype) for name, one in module.named_buffers()}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(own[name])
        found = [TOLERANCES.get(one.dtype, COARSE) for one in module.parameters() if one.is_floating_point()]
        self._tolerance = COARSE if traced.autocast else max(found, default=COARSE)

    def compare(self) -> str:
        """What differs, or nothing."""
        why = self._compare()
        start = _LOSS if self._traced.scored else _START
        return f"{start}{why}" if why else ""

    def _compare(self) -> str:
        once = self._run(self._model, backward=False)
        again = self._run(self._model)
        if self._apart(once.output, again.output):
            return (
                "called again, with the same weights, buffers and seeds, it gives something else. Its forward "
                "keeps something from call to call, such as a count, and a trace has one call; keep it in a buffer"
            )
        try:
            graph = self._run(self._graph)
        except Exception as error:
            return f"its graph fails where the model runs: {one_line(error)}"
        return self._differs(again, graph)

    def _differs(self, model: _Ran, graph: _Ran) -> str:
        if self._apart(model.output, graph.output):
            return "the output differs. It must depend on forward's arguments, weights and buffers alone"
        for name, buffer in model.buffers.items():
            if self._apart([buffer], [graph.buffers[name]]):
                return f"the buffer {name} is another after a forward; change it by torch's operations alone"
        least = 1e-6 * max(map(_largest, model.gradients.values()), default=0.0)
        for name, gradient in model.gradients.items():
            if self._apart([gradient], [graph.gradients[name]], least):
                return (
                    f"the gradient of {name} differs. The model has a backward of its own (autograd.Function, "
                    "torch.utils.checkpoint with use_reentrant=True) or a hook on gradients; write it as operations "
                    "that torch differentiates, or use dp with zero"
                )
        return ""

    def _run(self, forward: Callable[[], Any], backward: bool = True) -> _Ran:
        self._start.restore()
        for name, buffer in self._module.named_buffers():
            with torch.no_grad():
                buffer.copy_(self._buffers[name])
        self._module.zero_grad(set_to_none=True)
        roots: Roots = [], []
        with torch.set_grad_enabled(backward), self._example.surround():
            output = forward()
            if backward:
                roots = roots_of(output) if self._traced.scored else self._example.loss(output)
        if roots[0]:
            torch.autograd.backward(*roots)
        return _Ran(
            [one.detach() for one in tensors_in(output)],
            {name: buffer.clone() for name, buffer in self._module.named_buffers()},
            {
                name: torch.zeros_like(one) if one.grad is None else one.grad.to_dense()
                for name, one in self._module.named_parameters()
                if one.requires_grad
            },
        )

    def _model(self) -> Any:
        arguments, keywords = self._example.call
        output, scoring = self._module(*arguments, **keywords), self._example.scoring
        return scoring.terms(output, scoring.batch) if self._traced.scored and scoring else output

    def _graph(self) -> Any:
        traced = self._traced
        held = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        found = _Typed(traced.graph).run(*traced.bound(held, self._example.given(traced.scored)))
        with torch.no_grad():
            for name, value in zip(traced.mutated, found, strict=False):
                held[name].copy_(value)
        return filled(traced.output, found[len(traced.mutated) :])

    def _apart(self, some: Iterable[torch.Tensor], others: Iterable[torch.Tensor], least: float = 1e-12) -> bool:
        return any(self._off(one, other, least) for one, other in zip(some, others, strict=True))

    def _off(self, one: torch.Tensor, other: torch.Tensor, least: float) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return True
        if not one.numel() or torch.equal(one, other):
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return True
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
        apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
        return not float(apart.max()) <= self._tolerance * max(least, _largest(one))


class _Typed(fx.Interpreter):
    """Raises TypeError where an operation gives another type than the trace says, by which stages send it."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        value, said = super().run_node(n), n.meta.get("val")
        for one, other in zip(tree_leaves(said), tree_leaves(value), strict=False):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dtype != other.dtype:
                raise TypeError(f"{n} gives {other.dtype} where the trace has {one.dtype}")
        return value


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude that is a number."""
    sizes = values.abs()[values.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0
