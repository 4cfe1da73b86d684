"""Which axes are cut over the ranks of a tensor-parallel group, and what part of each tensor a rank then holds.

An axis that nothing needs whole can be cut: what is linear over it adds up (one all-reduce), what isn't works on each
part by itself. So the hidden features of a two-layer network are cut, the first weight by rows and the second by
columns, and attention by heads, whatever the model calls them (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stretto.errors import Refused
from stretto.graph.axes import Axis, Dim, Dims, leaves
from stretto.graph.reading import Reading, _each
from stretto.graph.trace import Traced
from stretto.graph.wishes import Wish
from stretto.state import Box, Part


@dataclass(frozen=True)
class Cut:
    """The axes that are cut, and into how many parts.

    Args:
        reading: of the graph.
        axes: no two of them meet in one tensor.
        degree: ranks.
        notes: which wishes were left, and why.
    """

    reading: Reading
    axes: frozenset[Axis]
    degree: int
    notes: tuple[str, ...] = ()

    def span(self, axis: Axis, rank: int) -> tuple[int, int]:
        """First and last index of a rank's part of an axis; the first parts are larger by one where it isn't even."""
        if axis not in self.axes:
            return 0, axis.size
        each, more = divmod(axis.size, self.degree)
        return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)

    def local(self, dim: Dim, rank: int) -> int:
        """How long a rank's part of a dimension is."""
        spans = (self.span(axis, rank) for axis in leaves(dim))
        return math.prod(last - first for first, last in spans)

    def axis_of(self, dims: Dims) -> tuple[int, Axis] | None:
        """The dimension of a tensor that is cut, and by which axis."""
        for place, dim in enumerate(dims):
            for axis in leaves(dim):
                if axis in self.axes:
                    return place, axis
        return None

    def part(self, dims: Dims, rank: int) -> Part:
        """What a rank holds of a tensor with these dimensions."""
        shape = tuple(math.prod(axis.size for axis in leaves(dim)) for dim in dims)
        found = self.axis_of(dims)
        if found is None:
            return Part((Box.whole(shape),))
        place, axis = found
        axes = leaves(dims[place])
        at = axes.index(axis)
        outer = math.prod(other.size for other in axes[:at])
        inner = math.prod(other.size for other in axes[at + 1 :])
        first, last = self.span(axis, rank)
        boxes = []
        for block in range(outer):
            starts, stops = [0] * len(shape), list(shape)
            starts[place] = (block * axis.size + first) * inner
            stops[place] = (block * axis.size + last) * inner
            boxes.append(Box(tuple(starts), tuple(stops)))
        return Part(tuple(boxes), place, axis.size, inner)


def plan_cut(
    reading: Reading, traced: Traced, degree: int, wishes: Mapping[str, Wish] = MappingProxyType({})
) -> Cut:
    """Chooses axes, those that are wished first, then those that most of the parameters have; none meets another in any
    tensor.

    Args:
        wishes: by the name of a parameter.

    Raises:
        Refused: a firm wish can't be followed.
    """
    weight: dict[Axis, int] = {}
    wished: dict[Axis, tuple[str, Wish]] = {}
    notes = []
    nodes = {node: traced.parameters[node.name] for node in reading.dims if node.name in traced.parameters}
    found = {name: reading.of(node) for node, name in nodes.items()}
    for name, wish in wishes.items():
        if wish.dim is None:
            reading.block(found[name], f"{wish.by} wants {name} whole")
    for dims in found.values():
        numel = math.prod(axis.size for dim in dims for axis in leaves(dim))
        for axis in {axis for dim in dims for axis in leaves(dim)}:
            weight[axis] = weight.get(axis, 0) + numel
    for name, wish in wishes.items():
        if wish.dim is None:
            continue
        axes = leaves(found[name][wish.dim])
        able = [axis for axis in axes if not axis.blocked and axis.size >= degree]
        if able:
            wished.setdefault(able[0], (name, wish))
        elif not any(axis.blocked for axis in axes) and axes:
            notes.append(_left(name, wish, f"its {max(axis.size for axis in axes)} are fewer than tp={degree}"))
        else:
            notes.append(_left(name, wish, next((axis.blocked for axis in axes if axis.blocked), "its size is 1")))
    able = [axis for axis in weight if not axis.blocked and axis.size >= degree]
    beside, twice = _beside(reading, able)
    chosen: set[Axis] = set()
    for axis in sorted(able, key=lambda each: (each not in wished, -weight[each])):
        if axis not in twice and not (beside[axis] - {axis}) & chosen:
            chosen.add(axis)
        elif axis in wished:
            notes.append(_left(*wished[axis], "a tensor would be cut twice"))
    return Cut(reading, frozenset(chosen), degree, tuple(notes))


def _left(name: str, wish: Wish, why: str) -> str:
    """What becomes of a wish that can't be followed. Raises Refused for a firm one."""
    said = f"{wish.by} wants {name} cut along dimension {wish.dim}, and that can't be: {why}"
    if wish.firm:
        raise Refused(f"plan: {said}; take it out of layout(), or use tp=1")
    return said


def _beside(reading: Reading, able: Sequence[Axis]) -> tuple[dict[Axis, set[Axis]], set[Axis]]:
    """Of each axis those that meet it in a tensor; and those that are twice in one, as the product of a matrix with
    itself has them."""
    beside: dict[Axis, set[Axis]] = {axis: set() for axis in able}
    twice: set[Axis] = set()
    for value in reading.dims.values():
        for dims in _each(value):
            inside = [axis for dim in dims for axis in leaves(dim) if axis in beside]
            for axis in inside:
                beside[axis].update(inside)
            twice.update(axis for axis in inside if inside.count(axis) > 1)
    return beside, twice


def follow_cut(reading: Reading, traced: Traced, parts: Mapping[str, Part], degree: int) -> Cut:
    """The cut of another graph of the same model by which a rank holds ``parts`` of parameters and buffers; of those
    without one it holds all.

    Raises:
        Refused: in this graph something needs all of what is cut.
    """
    chosen: set[Axis] = set()
    names = {**traced.parameters, **traced.buffers}
    held = {node: name for node in reading.dims if (name := names.get(node.name)) and node.op == "placeholder"}
    for node, name in held.items():
        dims, part = reading.dims[node], parts.get(name)
        if part is None or part.axis_size == 0 or not node.users:  # what this graph leaves alone stays as it lies
            continue
        before, within, after = reading.axes.dims((len(part.boxes), part.axis_size, part.inner))
        reading.axes.same(dims[part.dim], before + within + after)
        axes = within[0].leaves()
        if len(axes) > 1 or axes[0].blocked:
            why = axes[0].blocked or "its axis falls apart"
            raise Refused(f"plan: tp cuts {name}, but with a batch of another shape, or in evaluation, {why}")
        chosen.add(axes[0])
    cut = Cut(reading, frozenset(chosen), degree)
    for node, name in held.items():
        if cut.axis_of(reading.dims[node]) is not None and not (name in parts and parts[name].cut):
            raise Refused(
                f"plan: tp keeps {name} whole, but with a batch of another shape, or in evaluation, it is cut"
            )
    return cut


def report(cut: Cut, traced: Traced) -> Mapping[str, str]:
    """Of each parameter how it is cut, or why it isn't."""
    found = {}
    for node, dims in cut.reading.dims.items():
        if node.op == "placeholder" and node.name in traced.parameters:
            found[traced.parameters[node.name]] = _say(cut, dims)
    return found


def _say(cut: Cut, dims: Sequence[Dim]) -> str:
    at = cut.axis_of(tuple(dims))
    if at is not None:
        place, axis = at
        return f"dimension {place} cut along an axis of {axis.size}"
    why = dict.fromkeys(_why_whole(axis, cut.degree) for dim in dims for axis in leaves(dim))
    return "whole: " + "; ".join(why)


def _why_whole(axis: Axis, degree: int) -> str:
    if not axis.blocked and axis.size >= degree:
        return f"another axis that its {axis.size} meet is cut"
    return axis.blocked or f"{axis.size} are fewer than {degree}"
