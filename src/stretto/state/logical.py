"""Logical tensors and their boxes: plain geometry, without torch.

A *logical tensor* is a name with a shape and an element type, as one device would hold it. A *box* is a
rectangular part of it, in logical indices. A *slice* is the box that one member holds, with its data. Names
are ``model/<parameter or buffer>``, ``optimizer/main/<parameter>/<key>`` and ``generator/<which>``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.state.dtypes import dtype_name, item_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with ``starts[d] <= index[d] < stops[d]`` in every dimension d.

    A 0-dimensional box has no bounds and holds one element; a box with ``starts[d] == stops[d]`` holds none.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.stops):
            raise ValueError(f"a box needs as many starts as stops, got {self.starts} to {self.stops}")
        if any(a < 0 or b < a for a, b in zip(self.starts, self.stops, strict=True)):
            raise ValueError(f"a box needs 0 <= start <= stop, got {self.starts} to {self.stops}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes; None when there are none."""
        if len(self.starts) != len(other.starts):
            raise ValueError(f"boxes of {len(self.starts)} and {len(other.starts)} dimensions cannot meet")
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(b <= a for a, b in zip(starts, stops, strict=True)):
            return None
        return Box(starts, stops)

    def inside(self, outer: Box) -> bool:
        """Whether no bound of this box lies outside ``outer``."""
        return (
            len(self.starts) == len(outer.starts)
            and all(a >= o for a, o in zip(self.starts, outer.starts, strict=True))
            and all(b <= o for b, o in zip(self.stops, outer.stops, strict=True))
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array that holds ``outer``.

        Raises:
            ValueError: this box is not inside ``outer``.
        """
        if not self.inside(outer):
            raise ValueError(f"{self} is not inside {outer}")
        bounds = zip(self.starts, self.stops, outer.starts, strict=True)
        return tuple(slice(start - shift, stop - shift) for start, stop, shift in bounds)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.starts, self.stops, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor without its data: name, shape, element type (``"float32"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if any(n < 0 for n in self.shape):
            raise ValueError(f"{self.name}: a shape has no negative extents, got {self.shape}")

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a whole tensor under a name."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What one member holds of one logical tensor.

    ``data`` is local, of shape ``box.shape``. ``owner``: this member answers for these elements (it writes
    and digests them). Over all members the owner slices tile each logical tensor exactly once.
    """

    spec: TensorSpec
    box: Box
    data: torch.Tensor
    owner: bool

    def __post_init__(self) -> None:
        if not self.box.inside(Box.whole(self.spec.shape)):
            raise ValueError(f"{self.spec.name}: the box {self.box} is not inside shape {self.spec.shape}")
        if tuple(self.data.shape) != self.box.shape:
            raise ValueError(
                f"{self.spec.name}: the box {self.box} needs data of shape {self.box.shape}, "
                f"got {tuple(self.data.shape)}"
            )
        dtype = dtype_name(self.data.dtype)
        if dtype != self.spec.dtype:
            raise ValueError(f"{self.spec.name}: expected elements of type {self.spec.dtype}, got {dtype}")


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong when ``boxes`` should tile a tensor of ``shape`` exactly once; None when they do.

    Empty boxes count for nothing, but a tensor needs one box at least, so that an empty one is still known.
    """
    if not boxes:
        return "no part of it is there"
    whole = Box.whole(shape)
    for box in boxes:
        if not box.inside(whole):
            return f"the part {box} is outside shape {tuple(shape)}"
    solid = [box for box in boxes if box.numel]
    overlap = first_overlap(solid)
    if overlap is not None:
        return f"the parts {overlap[0]} and {overlap[1]} overlap"
    missing = whole.numel - sum(box.numel for box in solid)
    if missing:
        return f"{missing} of its {whole.numel} elements are in no part"
    return None


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, found by a sweep along the dimension that is cut into the most parts.

    Comparing all pairs would take a million steps a tensor with a thousand members; of boxes cut along one
    dimension the sweep holds one at a time.
    """
    if len(boxes) < 2:
        return None
    num_dims = len(boxes[0].starts)
    if num_dims == 0:
        return boxes[0], boxes[1]
    axis = max(range(num_dims), key=lambda d: len({box.starts[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.starts[axis]):
        active = [other for other in active if other.stops[axis] > box.starts[axis]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None
