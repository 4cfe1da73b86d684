"""What each operation of a graph costs, forward and backward, measured one by one on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import fx, nn

from stretto.data import Generators
from stretto.graph.stages import Work
from stretto.graph.trace import filled
from stretto.parallel._base import Example

ROUNDS: Final = 3  # the least of them counts


Seconds = tuple[float, float]
"""Forward and backward."""


def costs_of(work: Work, module: nn.Module, values: nn.Module, example: Example) -> list[Seconds]:
    """The time of each of ``work.nodes``, the loss's added to the last.

    Args:
        module: has the types that forward computes with.
        values: the same model, with values of its parameters and buffers.
    """
    before = Generators.remember()
    wanted = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {**dict(values.named_parameters()), **{name: buffer.clone() for name, buffer in values.named_buffers()}}
    held = {name: given[name].detach().to(tensor.device, tensor.dtype) for name, tensor in wanted.items()}
    try:
        clock = _Clock(work, held, example)
        clock.run()
        alike = _alike(work, clock.seconds)
        seconds = [alike.get(node, (0.0, 0.0)) for node in work.nodes]
        forward, backward = clock.loss(example)
        seconds[-1] = seconds[-1][0] + forward, seconds[-1][1] + backward
    finally:
        before.restore()
    return seconds


def _alike(work: Work, measured: Mapping[fx.Node, Seconds]) -> dict[fx.Node, Seconds]:
    """The same operation on tensors of the same kind costs the same: the median of what was measured of each. So equal
    layers have equal costs, also on a machine that does other things beside."""
    kinds: dict[str, list[fx.Node]] = {}

    def kind(one: fx.Node) -> Any:
        value = one.meta.get("val")
        lies = (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else type(value)
        return f"{lies} {one in work.carries}"

    for node in measured:
        kinds.setdefault(repr((node.target, fx.map_arg((node.args, node.kwargs), kind))), []).append(node)
    found: dict[fx.Node, Seconds] = {}
    for nodes in kinds.values():
        forward, backward = (median(measured[node][way] for node in nodes) for way in (0, 1))
        found |= dict.fromkeys(nodes, (forward, backward))
    return found


class _Clock(fx.Interpreter):
    """Runs the graph once; each operation a few times, under the clock."""

    def __init__(self, work: Work, held: Mapping[str, torch.Tensor], example: Example) -> None:
        super().__init__(work.traced.graph, garbage_collect_values=True)
        self._work, self._held, self._example = work, held, example
        self._timed = frozenset(work.nodes)
        self.seconds: dict[fx.Node, Seconds] = {}
        self._idle = _best(lambda: _backward(torch.ones(1, requires_grad=True).view(1)))
        self._found: Any = None

    def run(self) -> None:  # type: ignore[override]
        """Fills ``seconds``."""
        values = self._work.traced.bound(self._held, self._example.given(self._work.traced.scored))
        self._found = super().run(*values)

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, without its history."""
        if n not in self._timed:
            with torch.no_grad(), self._example.surround():
                return super().run_node(n)
        carries = n in self._work.carries and not _changes(n)
        forward = backward = float("inf")
        for _ in range(1 if _changes(n) else ROUNDS):
            leaves: dict[fx.Node, Any] = {
                one: _leaf(self.env[one], carries and one in self._work.carries) for one in n.all_input_nodes
            }
            arguments, keywords = fx.map_arg((n.args, n.kwargs), leaves.__getitem__)
            began = time.perf_counter()
            with torch.set_grad_enabled(carries), self._example.surround():  # anew, as it may keep what it cast
                value = getattr(self, n.op)(n.target, arguments, keywords)
            forward = min(forward, time.perf_counter() - began)
            taken = _best(partial(_backward, value), 1) - self._idle if carries else 0.0
            backward = min(backward, max(0.0, taken))
        self.seconds[n] = forward, backward
        return torch.utils._pytree.tree_map(_plain, value)

    def loss(self, example: Example) -> Seconds:
        """Of the loss, where it isn't in the graph."""
        if self._work.traced.scored:
            return 0.0, 0.0
        changed = len(self._work.traced.mutated)
        values: Any = [None if one is None else _leaf(one, one.is_floating_point()) for one in self._found[changed:]]

        found: list[Any] = []

        def forward() -> None:
            with example.surround():
                found[:] = [example.loss(filled(self._work.traced.output, values))]

        forwards = _best(forward)
        roots, weights = found[0]
        return forwards, _best(lambda: torch.autograd.backward(roots, weights, retain_graph=True))


def _best(action: Callable[[], None], rounds: int = ROUNDS) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


def _leaf(value: Any, carries: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(carries and (value.is_floating_point() or value.is_complex()))


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _backward(value: Any) -> None:
    found: Iterable[Any] = value if isinstance(value, tuple | list) else [value]
    roots = [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _changes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable
