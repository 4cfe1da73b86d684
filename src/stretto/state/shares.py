"""Dealing tensors to holders: who updates which part of a tensor that every holder has whole, and in what order the
parts lie in flat memory so that one collective moves many of them. Pure geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from stretto.state.logical import Box, TensorSpec
from stretto.state.owners import assign_owners

# A tensor larger than this share of one holder's load is cut by rows; smaller ones go whole to one holder, as many of
# them travel in one collective. With it no holder's load is more than about an eighth above the others'.
CUT_ABOVE: Final = 1 / 8

Shares = tuple[Box, ...]


def deal(specs: Sequence[TensorSpec], num_holders: int, whole_tensors: bool) -> dict[str, Shares]:
    """What each holder updates of each tensor, by name: one box a holder, together the whole tensor.

    Args:
        whole_tensors: no tensor may be cut: its one owner has all of it.
    """
    total = sum(spec.num_bytes for spec in specs)
    found: dict[str, Shares] = {}
    owned = []
    for spec in specs:
        large = spec.num_bytes * num_holders > total * CUT_ABOVE
        if large and not whole_tensors and spec.shape and spec.shape[0] >= num_holders > 1:
            found[spec.name] = cut_rows(spec.shape, num_holders)
        else:
            owned.append(spec)
    for name, owner in assign_owners((spec for spec in owned if spec.shape), num_holders).items():
        shape = next(spec.shape for spec in owned if spec.name == name)
        nothing = Box((0,) * len(shape), (0, *shape[1:]))
        found[name] = tuple(Box.whole(shape) if holder == owner else nothing for holder in range(num_holders))
    return found


def cut_rows(shape: Sequence[int], num_holders: int) -> Shares:
    """The first dimension in blocks by ``torch.chunk``'s rule, which FSDP2 follows too."""
    rows = -(-shape[0] // num_holders)
    edges = [min(holder * rows, shape[0]) for holder in range(num_holders + 1)]
    rest = tuple(shape[1:])
    zeros = (0,) * len(rest)
    return tuple(Box((first, *zeros), (last, *rest)) for first, last in pairwise(edges))


@dataclass(frozen=True)
class Bucket:
    """Flat memory for some tensors of one type, each contiguous.

    Args:
        names: in the order of memory.
        offsets: where each tensor begins, in elements.
        numel: elements in all.
        sizes: how many elements each holder updates, in the order of memory; None where everyone updates everything.
    """

    names: tuple[str, ...]
    offsets: Mapping[str, int]
    numel: int
    sizes: tuple[int, ...] | None

    def part(self, holder: int) -> slice:
        """The elements that ``holder`` updates."""
        if self.sizes is None:
            return slice(0, self.numel)
        first = sum(self.sizes[:holder])
        return slice(first, first + self.sizes[holder])


def pack(specs: Iterable[TensorSpec], shares: Mapping[str, Shares], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most ``bucket_bytes`` (or one tensor) and one type, in the given order.

    A tensor that is not among ``shares`` is updated by everyone. One that is cut by rows has a bucket of its own, since
    within a bucket the elements of each holder lie together.
    """
    groups: list[list[TensorSpec]] = []
    filled, kind = 0, ("", "")
    for spec in specs:
        boxes = shares.get(spec.name)
        cut = boxes is not None and sum(box.numel > 0 for box in boxes) > 1
        this = (spec.dtype, spec.name if cut else "all" if boxes is None else "one")
        if not groups or this != kind or filled + spec.num_bytes > bucket_bytes:
            groups.append([])
            filled, kind = 0, this
        groups[-1].append(spec)
        filled += spec.num_bytes
    return [_bucket(group, shares) for group in groups]


def _bucket(specs: Sequence[TensorSpec], shares: Mapping[str, Shares]) -> Bucket:
    known = shares.get(specs[0].name)
    sizes = None
    if known is not None:
        by_holder = [[box.numel for box in boxes] for boxes in zip(*(shares[s.name] for s in specs), strict=True)]
        sizes = tuple(sum(parts) for parts in by_holder)
        if len(specs) > 1:  # each has one owner: the owners' tensors lie together
            specs = sorted(specs, key=lambda spec: _owner(shares[spec.name]))
    offsets: dict[str, int] = {}
    total = 0
    for spec in specs:
        offsets[spec.name] = total
        total += math.prod(spec.shape)
    return Bucket(tuple(spec.name for spec in specs), offsets, total, sizes)


def _owner(boxes: Shares) -> int:
    return next((holder for holder, box in enumerate(boxes) if box.numel), 0)
