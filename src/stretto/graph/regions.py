"""Where values that every rank of a tensor-parallel group would hold whole can lie in parts along the sequence.

Between two layers that are cut, sums, norms and dropout treat each place of a sequence by itself, so a rank needs only
its own places (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Such a *region* begins where a cut layer's partial
sums are added up, and ends where an operation needs the whole sequence. There the gathered value is the same on all
ranks. If it then goes into cut layers only, each rank has just its own part of the gradient, up to the gather.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stretto.graph.axes import Axis, Dims, leaves
from stretto.graph.cut import Cut
from stretto.graph.effects import base_of, draws_in, written_in
from stretto.graph.reading import _argument, _each, _name, _shape
from stretto.graph.trace import Traced

_AS_IT_IS: Final = ("dropout", "to", "alias", "clone", "contiguous", "detach", "_to_copy")
_MOVES: Final = (
    *("transpose", "permute", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
)
_NORMS: Final = ("layer_norm", "rms_norm")
_SOFTMAX: Final = ("softmax", "log_softmax", "_softmax")
_REDUCTIONS: Final = ("mean", "sum", "amax", "amin", "logsumexp")
_CONVOLUTIONS: Final = ("conv1d", "conv2d", "conv3d")
_SUMS: Final = ("linear", "matmul", "bmm", "mm", "embedding", *_CONVOLUTIONS)


@dataclass(frozen=True)
class Regions:
    """What lies in parts along a sequence.

    Args:
        axes: of each value of a region the axis that it is cut along.
        partial: values that are whole on each rank, and whose gradient there is a part of a sum over the ranks.
        why: there is no region, and why; empty where there is one.
    """

    axes: Mapping[fx.Node, Axis]
    partial: frozenset[fx.Node]
    why: str = ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences."""
        return tuple(sorted({axis.size for axis in self.axes.values()}))

    def lying(self, node: fx.Node, cut: Cut) -> Cut:
        """The cut by which a value lies on the ranks."""
        axis = self.axes.get(node)
        return cut if axis is None else Cut(cut.reading, frozenset({axis}), cut.degree)


NONE: Final = Regions({}, frozenset())


def find_regions(cut: Cut, traced: Traced) -> Regions:
    """The regions of a graph that ``cut`` cuts."""
    finder = _Finder(cut, traced)
    axes = finder.grow()
    if axes:
        return Regions(axes, frozenset(finder.partial(axes)))
    return Regions({}, frozenset(), finder.why_none())


class _Finder:
    def __init__(self, cut: Cut, traced: Traced) -> None:
        self._cut, self._reading, self._traced = cut, cut.reading, traced
        self._nodes = list(traced.graph.graph.nodes)
        given = (node for node in self._nodes if node.name in traced.arguments)
        firsts = (self._reading.of(node)[:1] for node in given if _shape(node))
        self._batch = frozenset(axis for dims in firsts for dim in dims for axis in leaves(dim)[:1])
        self._written = frozenset(written_in(self._nodes))
        self._short: list[int] = []  # lengths that are too short
        self._descent: dict[fx.Node, frozenset[fx.Node]] = {}  # of whole values: those of a region they are made of

    def why_none(self) -> str:
        """After :meth:`grow` found nothing."""
        if self._short:
            return f"its sequence of {max(self._short)} is shorter than tp={self._cut.degree}"
        if not any(self._sequence(node) for node in self._nodes):
            return "no sum of a cut layer has a dimension beside the batch and the features"
        return "nothing that follows a cut layer treats each place of the sequence by itself"

    def grow(self) -> dict[fx.Node, Axis]:
        """Of every value of a region its axis."""
        found: dict[fx.Node, Axis] = {}
        for node in self._nodes:
            axis = self._sequence(node) or self._within(node, found)
            if axis is not None:
                found[node] = axis
            elif self._is_whole(node):
                made = (frozenset({one}) if one in found else self._descent.get(one, frozenset())
                        for one in node.all_input_nodes)  # fmt: skip
                self._descent[node] = frozenset().union(*made)
        return {node: axis for node, axis in found.items()
                if not self._adds_up(node) or not found.keys().isdisjoint(node.users)}  # fmt: skip

    def partial(self, axes: Mapping[fx.Node, Axis]) -> Iterator[fx.Node]:
        """Whole values made of a region's that go into cut layers alone, the last first."""
        found: set[fx.Node] = set()
        for node in reversed(self._nodes):
            plain = node not in axes and self._is_whole(node) and bool(self._descent.get(node))
            known = node.target is not operator.getitem and _name(node) != "batch_norm"
            if plain and known and _floats(node) and self._plain(node):
                uses = list(node.users)
                if uses and all(use in found or self._enters(node, use, axes) for use in uses):
                    found.add(node)
                    yield node

    # ---- questions about one operation

    def _sequence(self, node: fx.Node) -> Axis | None:
        """Of a sum that is added up over ranks its longest dimension beside batch and features."""
        if not self._adds_up(node) or not _floats(node) or not self._plain(node):
            return None
        dims: Dims = self._reading.of(node)
        features = 1 if _name(node) in _CONVOLUTIONS else len(dims) - 1
        able = [axis for place, dim in enumerate(dims) if place != features for axis in leaves(dim)
                if axis not in self._batch and axis not in self._cut.axes and _once(axis, dims)]  # fmt: skip
        longest = max(able, key=lambda axis: axis.size, default=None)
        if longest is not None and longest.size < self._cut.degree:
            self._short.append(longest.size)
            return None
        return longest

    def _within(self, node: fx.Node, axes: Mapping[fx.Node, Axis]) -> Axis | None:
        """Of an operation on a region's values that treats each place by itself the axis of these."""
        before = [one for one in node.all_input_nodes if one in axes]
        if not before or not self._is_whole(node) or not self._plain(node) or _shape(node) == ():
            return None
        axis, dims = axes[before[0]], self._reading.of(node)
        if node in self._reading.loss or not _once(axis, dims) or not _by_place(node, axis, dims):
            return None
        # What is gathered here anyway, and comes back to itself, is whole already.
        others = (one for one in node.all_input_nodes if one not in axes)
        back = any(not self._descent.get(one, frozenset()).isdisjoint(before) for one in others)
        return None if back else axis

    def _adds_up(self, node: fx.Node) -> bool:
        known = node.op == "call_function" and node in self._reading.fed and node not in self._reading.loss
        return known and _name(node) in _SUMS and self._over(node)

    def _over(self, node: fx.Node) -> bool:
        return not self._cut.axes.isdisjoint(leaves(self._reading.contracted.get(node, ())))

    def _is_cut(self, node: fx.Node) -> bool:
        return any(self._cut.axis_of(dims) is not None for dims in _each(self._reading.dims[node]))

    def _is_whole(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not self._over(node) and not self._is_cut(node)

    def _plain(self, node: fx.Node) -> bool:
        """It neither changes anything nor is changed."""
        schema = getattr(node.target, "_schema", None)
        return schema is not None and not schema.is_mutable and base_of(node) not in self._written

    def _enters(self, node: fx.Node, use: fx.Node, axes: Mapping[fx.Node, Axis]) -> bool:
        """Whether ``use`` is a part's, so that its gradient of ``node`` is a part of a sum."""
        if use.op != "call_function" or use in self._reading.loss or not isinstance(use.meta.get("val"), torch.Tensor):
            return False
        if self._over(use):  # but for a bias, which comes after the sum
            return node in use.args[:2]
        return use not in axes and self._is_cut(use)


def _by_place(node: fx.Node, axis: Axis, dims: Dims) -> bool:
    """Whether an operation gives the same of a part along an axis as of the whole."""
    name = _name(node)
    if draws_in(node) and name != "dropout":
        return False
    if name in _NORMS:
        shape: Any = node.args[1]
        return all(axis not in leaves(dim) for dim in dims[-len(shape) :])
    if name in _SOFTMAX:
        return axis not in leaves(dims[int(_argument(node, 1, "dim"))])
    # What a reduction leaves has the axis, so it doesn't run over it.
    return name in (*_AS_IT_IS, *_MOVES, *_REDUCTIONS) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _once(axis: Axis, dims: Dims) -> bool:
    return sum(leaves(dim).count(axis) for dim in dims) == 1
