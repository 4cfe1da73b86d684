"""Dealt parameters that are whole only while they are used, for ranks that share no memory.

At rest a rank has its share of them. A stage of the traced graph runs in pieces (:mod:`.stretches`), and before each,
forward and again backward, the parameters of that piece are gathered, and those of the piece before it let go (ZeRO,
arXiv 1910.02054, section 5.3). Letting go takes a tensor's memory from under it, and gathering gives it new memory, as
FSDP2 does: what autograd keeps of a parameter is the same tensor, and finds its numbers there again.

Autograd runs what is ready in the reverse of the order in which it was made, so all of a piece's backward comes before
any of the piece's before it, and the first thing to come is a gradient of what the piece gave. Which pieces backward
enters may hang on the data, as a loss may leave an output alone. All ranks gather all the same: a gathering that one of
them left out would be taken for another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from stretto.comm.group import SHARED_MEMORY, Group
from stretto.comm.members import Members
from stretto.comm.shm_memory import Unavailable
from stretto.parallel._base import Place
from stretto.parallel.copies import lay_flat
from stretto.parallel.flats import GATHER_BYTES, Flats, without_one_copy
from stretto.state import Shares, TensorSpec, pack

LEAST_BYTES: Final = 2**20
"""Parameters of a piece: fewer aren't worth messages of their own."""
PIECES: Final = 16
"""In about so many pieces, at most, the parameters of a stage come."""

Names = tuple[str, ...]
Pieces = dict[int, tuple[list[str], list[int]]]
"""By stage, the operations of its graph, and the places where pieces begin."""


def lent_place(place: Place, share: Sequence[int]) -> Place:
    """A dealt parameter of which only the share of ``place`` stays."""
    dtype: torch.dtype = getattr(torch, place.spec.dtype)
    own = nn.Parameter(torch.empty(tuple(share), dtype=dtype, device=place.compute.device), place.compute.requires_grad)
    return replace(place, local=own, holders=replace(place.holders, lent=True))


def memory_for(
    parameters: Mapping[str, nn.Parameter],
    specs: Sequence[TensorSpec],
    shares: Mapping[str, Shares],
    dealers: Members,
    everyone: Group,
    one_copy: bool,
) -> tuple[Flats, Lender | None, tuple[str, ...]]:
    """Where dealt parameters lie, and what there is to say about it. Every rank must call it.

    Args:
        one_copy: once for all dealers, in memory that they share; where they can't, in shares that a lender gathers.
    """
    if not one_copy or dealers.size == 1:
        return Flats(parameters, specs, shares, dealers, one_copy=False), None, ()
    flats, why = None, ""
    try:
        flats = Flats(parameters, specs, shares, dealers, one_copy=True)
    except Unavailable as error:
        why = str(error)
    why = next(filter(None, everyone.gather_json(why)), "")  # other dealers than these may have got none
    if flats is not None and not why:
        return flats, None, ()
    said = without_one_copy(why, "piece after piece of the traced graph")
    notes = (said,) if everyone.transport == SHARED_MEMORY else ()
    return Flats({}, (), {}, dealers, one_copy=False), Lender(dealers, specs), notes


@dataclass(frozen=True)
class _Bucket:
    """Parameters that come together.

    Args:
        flat: their memory, or none.
        sizes: of each member's share.
        own: of this member's shares, where they lie in ``flat``, and what they are.
    """

    flat: torch.Tensor
    num_bytes: int
    sizes: tuple[int, ...]
    own: tuple[tuple[int, torch.Tensor], ...]

    def fill(self, world: Members) -> None:
        """Gathers it."""
        self.flat.untyped_storage().resize_(self.num_bytes)
        for first, share in self.own:
            self.flat[first : first + share.numel()].view(share.shape).copy_(share)
        world.gather_parts(self.flat, self.sizes)

    def empty(self) -> None:
        """Lets it go."""
        self.flat.untyped_storage().resize_(0)


class Lender:
    """The dealt parameters of one module. Every member of ``world`` must ask for the same, in the same order.

    Args:
        specs: of them, as they lie here.

    ``pieces``: of each stage where they begin, as the first graph of it was cut. Ranks run batches of other shapes,
    which recomputation would cut elsewhere, and must gather alike.
    """

    def __init__(self, world: Members, specs: Sequence[TensorSpec]) -> None:
        self._world, self._specs = world, specs
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[str, int] = {}
        self._here: set[int] = set()
        self.pieces: Pieces = {}
        self._memory: frozenset[int] = frozenset()

    def lay(self, places: Mapping[str, Place], groups: Iterable[Names]) -> None:
        """Moves the parameters, to be gathered group by group; one that is in several comes with the first."""
        left = {spec.name: spec for spec in self._specs}
        shares = {name: held for name in left if (held := places[name].shares) is not None}
        for names in (*groups, tuple(left)):
            group = [left.pop(name) for name in names if name in left]
            several = {spec.name: sum(box.numel > 0 for box in shares[spec.name]) > 1 for spec in group}
            group.sort(key=lambda spec: several[spec.name])  # so that those of one owner each lie together
            for bucket in pack(group, shares, GATHER_BYTES):
                assert bucket.sizes is not None
                first = places[bucket.names[0]].compute
                flat = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
                lay_flat({name: places[name].compute for name in bucket.names}, bucket.offsets, flat)
                own = []
                for name in bucket.names:
                    share = shares[name][self._world.rank]
                    at = bucket.offsets[name] + share.starts[0] * math.prod(share.shape[1:])
                    own += [(at, places[name].local.detach())] if share.numel else []
                self._bucket_of |= dict.fromkeys(bucket.names, len(self._buckets))
                self._buckets.append(_Bucket(flat, flat.nbytes, bucket.sizes, tuple(own)))
                self._buckets[-1].empty()
        self._memory = frozenset(_memory(bucket.flat) for bucket in self._buckets)

    @torch.no_grad()
    def take(self, names: Iterable[str]) -> None:
        """Has these whole, and no others; names of what isn't dealt are passed over."""
        wanted = {self._bucket_of[name] for name in names if name in self._bucket_of}
        for index in sorted(self._here - wanted):
            self._buckets[index].empty()
        self._here &= wanted
        for index in sorted(wanted - self._here):
            self._buckets[index].fill(self._world)
            self._here.add(index)

    def kept(self, value: Any) -> Any:
        """A value that outlives the piece that gave it; of a view of a parameter, a copy."""
        lent = isinstance(value, torch.Tensor) and _memory(value) in self._memory
        return value.clone() if lent else value


class Visit:
    """One microbatch's way through the pieces of a stage."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._ahead: list[Names] = []  # the pieces whose backward is still to come, the next one last

    def enter(self, names: Names) -> None:
        """Forward begins with a piece of which these are the parameters."""
        self._lender.take(names)

    def leave(self, names: Names, found: Sequence[Any]) -> list[Any]:
        """It ends; what it gave."""
        values = [self._lender.kept(value) for value in found]
        reached = [one for one in values if isinstance(one, torch.Tensor) and one.requires_grad and not one.is_leaf]
        if reached and torch.is_grad_enabled():
            self._ahead.append(names)
            place = len(self._ahead)
            register_multi_grad_hook(reached, lambda _: self._back(place), mode="any")
        return values

    def _back(self, place: int) -> None:
        """Backward comes to a piece: all behind it in forward have been, or are left out."""
        while len(self._ahead) >= place:
            self._lender.take(self._ahead.pop())

    def finish(self) -> None:
        """Backward is over; what it has left out is gathered for the others."""
        self._back(1)


def _memory(tensor: torch.Tensor) -> int:
    """The identity of a storage, which it keeps while its memory goes and comes."""
    if tensor.layout != torch.strided:
        return 0
    found: Any = tensor.untyped_storage()._cdata
    return int(found)
