"""What one member holds of a tensor, where that may be several boxes. Pure geometry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from stretto.state.logical import Box


@dataclass(frozen=True)
class Part:
    """The boxes of a tensor that one member holds, as one local tensor.

    Args:
        boxes: in logical indices; laid one after another along ``dim`` they make the local tensor.
        dim: the dimension that is cut; 0 where none is.
        axis_size: of the axis that tensor parallelism cuts the dimension along, all of it; 0 where it cuts none.
        inner: how many elements of the dimension belong to each index of the axis.
    """

    boxes: tuple[Box, ...]
    dim: int = 0
    axis_size: int = 0
    inner: int = 1

    @property
    def cut(self) -> bool:
        """Whether tensor parallelism cuts it."""
        return self.axis_size > 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        extent = list(self.boxes[0].shape)
        if extent:
            extent[self.dim] = sum(box.shape[self.dim] for box in self.boxes)
        return tuple(extent)

    def rows(self, first: int, last: int) -> Part:
        """Of the local tensor the rows from ``first`` to before ``last``."""
        found = []
        for box, where in self.places():
            at = where.start if self.dim == 0 else 0
            start, stop = max(first - at, 0), min(last - at, box.shape[0])
            if start < stop:
                rest = box.starts[1:], box.stops[1:]
                found.append(Box((box.starts[0] + start, *rest[0]), (box.starts[0] + stop, *rest[1])))
        nothing = Box((0,) * len(self.shape), (0, *self.shape[1:]))
        return replace(self, boxes=tuple(found or [nothing]))

    @property
    def pieces(self) -> list[tuple[Box, tuple[slice, ...]]]:
        """Each box, and where it lies in the local tensor."""
        if len(self.boxes) == 1:
            return [(self.boxes[0], (slice(None),) * len(self.boxes[0].starts))]
        ahead = (slice(None),) * self.dim
        return [(box, (*ahead, where)) for box, where in self.places()]

    def places(self) -> list[tuple[Box, slice]]:
        """Each box, and where along ``dim`` it lies in the local tensor."""
        extents = [box.shape[self.dim] if box.shape else 1 for box in self.boxes]
        edges = [sum(extents[:place]) for place in range(len(extents) + 1)]
        return [(box, slice(first, last)) for box, (first, last) in zip(self.boxes, pairwise(edges), strict=True)]
