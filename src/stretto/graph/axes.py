"""Dimensions of a computation that are one and the same, found by union and refinement.

Each dimension of each tensor is a product of *axes*: a view that splits 768 into 12 heads of 64 says that the dimension
was always heads times 64. What an operation reads together is one axis: the columns of a weight and the features that
it multiplies, the two sides of a sum. So the whole model falls into axes (as in Mesh-TensorFlow, arXiv 1811.02084, but
found, not named). An axis may be *blocked*: some operation needs all of it at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Dim = tuple["Axis", ...]  # axes whose sizes multiply to the dimension's, outermost first; none for a size of 1
Dims = tuple[Dim, ...]


class Axis:
    """One axis, or a part that was found to be another one or to be made of smaller ones. Made by :class:`Axes`."""

    __slots__ = ("_parts", "_same", "_why", "size")

    def __init__(self, size: int, why: str) -> None:
        self.size = size
        self._why = why
        self._same: Axis | None = None
        self._parts: Dim = ()

    @property
    def blocked(self) -> str:
        """Why it can't be cut; empty where it can."""
        return self._root()._why

    def block(self, why: str) -> None:
        """Some operation needs all of it; the first reason stands."""
        for leaf in self.leaves():
            leaf._why = leaf._why or why

    def leaves(self) -> Dim:
        """The axes that it is made of, as far as is known by now."""
        root = self._root()
        if not root._parts:
            return (root,)
        return tuple(leaf for part in root._parts for leaf in part.leaves())

    def _root(self) -> Axis:
        axis = self
        while axis._same is not None:
            axis = axis._same
        if axis is not self:
            self._same = axis  # so that the way is short next time
        return axis


class Axes:
    """Makes axes and finds out which are the same."""

    def dims(self, shape: Sequence[int], why: str = "") -> Dims:
        """New axes for a tensor of ``shape``; blocked where there is a reason."""
        return tuple((Axis(size, why),) if size != 1 else () for size in shape)

    def same(self, left: Dim, right: Dim) -> None:
        """Two products of axes are one and the same, in order. Where their sizes don't fit they are blocked."""
        ours, theirs = list(reversed(left)), list(reversed(right))
        while ours and theirs:
            a, b = _next(ours), _next(theirs)
            if a is b:
                continue
            if a.size == b.size:
                self._merge(a, b)
            elif a.size > b.size and a.size % b.size == 0:
                ours.extend(reversed(self._split(a, b.size)[1:]))
                self._merge(a.leaves()[0], b)
            elif b.size > a.size and b.size % a.size == 0:
                theirs.extend(reversed(self._split(b, a.size)[1:]))
                self._merge(a, b.leaves()[0])
            else:
                for axis in (a, b, *ours, *theirs):
                    axis.block(f"sizes {a.size} and {b.size} of a view have no common part")
                return

    @staticmethod
    def _merge(a: Axis, b: Axis) -> None:
        if a is not b:
            a._why = a._why or b._why
            b._same = a

    @staticmethod
    def _split(axis: Axis, outer: int) -> Dim:
        axis._parts = (Axis(outer, axis._why), Axis(axis.size // outer, axis._why))
        return axis._parts


def _next(stack: list[Axis]) -> Axis:
    """The next leaf; what it was the first part of leaves the others."""
    first, *others = stack.pop().leaves()
    stack.extend(reversed(others))
    return first


def leaves(dim: Iterable[Axis]) -> Dim:
    """The axes that a dimension is made of, as far as is known."""
    return tuple(leaf for axis in dim for leaf in axis.leaves())


def size(dim: Iterable[Axis]) -> int:
    """The dimension's size."""
    return math.prod(axis.size for axis in dim)
