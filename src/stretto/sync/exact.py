"""``sync=exact``: every gradient is added over every rank at every step (synchronous SGD, arXiv 1604.00981).

Parameters whose layout doesn't add gradients itself are packed into flat buckets, in the reverse of the model's order,
which is about the order in which backward makes them (as in PyTorch DDP, arXiv 2006.15704, section 3.2). A bucket is
sent as soon as it is full, always in the same order on every rank, while backward goes on. Where the layout itself
communicates in backward (BatchNorm, FSDP2's reduce-scatters), buckets wait for the end: collectives must come in one
order everywhere, and a parameter that only some ranks use would change it.

Where ranks update only shares of the parameters, each needs the sum of its own shares alone (a reduce-scatter instead
of an all-reduce). Sparse gradients are gathered, rows and values, and added up by everyone alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stretto.comm.members import Members
from stretto.state import Shares, TensorSpec, pack
from stretto.sync._base import Layout, Part
from stretto.sync.buckets import GradientBucket, Kept, Lone, Passing

BUCKET_BYTES: Final = 8 * 2**20
IN_FLIGHT: Final = 2  # passing buckets that may be on their way at once


class ExactSum:
    """The rule over one layout; see :class:`Sync`.

    Args:
        keep: buckets are kept through the step and sent once; otherwise they are sent after each microbatch, and each
            rank keeps what it updates.
    """

    def __init__(self, layout: Layout, keep: bool = True, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._layout, self._keep = layout, keep
        self._world, self._replicas = layout.ranks.world, layout.ranks.replicas
        own = {n: p for n, p in layout.places.items() if not p.summed and not p.elsewhere and p.compute.requires_grad}
        dense = {name: place for name, place in own.items() if not place.sparse}
        shares: dict[str, Shares] = {name: p.shares for name, p in dense.items() if p.shares is not None}
        self._buckets: list[GradientBucket] = []
        for together in _by_holders(dense):
            kind = Lone if together[0].adds.size == 1 else Kept if keep else Passing
            packed = pack([_held(place) for place in reversed(together)], shares, bucket_bytes)
            self._buckets += [kind(bucket, dense, together[0].adds) for bucket in packed]
        self._bucket_of = {name: index for index, bucket in enumerate(self._buckets) for name in bucket.names}
        self._order = {name: index for index, name in enumerate(layout.places)}
        self._reached = torch.zeros(len(self._order), dtype=torch.float64)
        self._sparse: dict[str, torch.Tensor | None] = dict.fromkeys(name for name in own if name not in dense)
        self._by_layout = tuple(n for n, p in layout.places.items() if p.summed and p.local.requires_grad)
        self._summed: dict[str, torch.Tensor] = {}  # over several copies of the weights, where there are several
        self._waiting = [len(bucket.names) for bucket in self._buckets]
        self._next = 0
        self._sending = False
        self._counting = True
        self._fired: set[str] = set()
        self._late = False  # a gradient came in two parts once: from then on buckets wait for the end of backward
        self._spoiled = False
        self._hooks: list[RemovableHandle] = [
            place.compute.register_post_accumulate_grad_hook(partial(self._ready, name))  # type: ignore[no-untyped-call]
            for name, place in own.items()
        ]

    def begin(self) -> None:
        """See :class:`Sync`."""
        self._layout.clear_gradients()
        self._reached.zero_()
        self._spoiled = False
        self._summed = {}
        for name in self._sparse:
            self._sparse[name] = None
            self._layout.places[name].compute.grad = None
        for bucket in self._buckets:
            bucket.begin()

    @contextmanager
    def microbatch(self, last: bool, ghost: bool, ends: bool = True) -> Iterator[None]:
        """See :class:`Sync`."""
        sends = last or (ends and not self._keep)
        self._sending = sends and not self._layout.communicates and not self._late
        self._counting = not ghost
        self._next = 0
        self._fired.clear()
        self._waiting = [len(bucket.names) for bucket in self._buckets]
        with self._layout.microbatch(last, ghost), self._world.guard():
            yield
        if sends:  # buckets that some parameter never filled
            while self._next < len(self._buckets):
                self._send()

    def _ready(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd has added a gradient at ``parameter``."""
        if self._counting:
            self._reached[self._order[name]] = 1.0
        if name in self._sparse:
            self._keep_sparse(name, parameter)
            return
        index = self._bucket_of[name]
        self._buckets[index].arrived(name)
        if not self._sending:
            return
        if name in self._fired:  # as re-entrant checkpoints do, which run a backward within the backward
            self._late = True
            self._spoiled |= index < self._next
            return
        self._fired.add(name)
        self._waiting[index] -= 1
        while self._next < len(self._buckets) and self._waiting[self._next] <= 0:
            self._send()

    def _keep_sparse(self, name: str, parameter: nn.Parameter) -> None:
        """A ghost's rows are left out: an optimizer that updates only the rows it is given would move them."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not self._counting:
            return
        wide = gradient.to(self._layout.places[name].local.dtype)
        before = self._sparse[name]
        self._sparse[name] = wide if before is None else before + wide

    def _send(self) -> None:
        self._buckets[self._next].send()
        if not self._keep and self._next >= IN_FLIGHT:
            self._buckets[self._next - IN_FLIGHT].settle()
        self._next += 1

    def finish(self) -> None:
        """See :class:`Sync`."""
        with self._world.guard():
            for bucket in self._buckets:
                bucket.settle()
            for bucket in self._buckets:
                bucket.add_copies()
        for name, gradient in self._sparse.items():
            place = self._layout.places[name]
            if gradient is None:
                gradient = torch.sparse_coo_tensor(
                    torch.empty(1, 0, dtype=torch.int64, device=place.compute.device),
                    torch.empty(0, *place.spec.shape[1:], dtype=place.local.dtype, device=place.compute.device),
                    place.spec.shape,
                )
            self._sparse[name] = place.adds.all_gather_sparse(gradient)
        self._add_replicas()
        for name, place in self._layout.places.items():
            if place.summed and self._layout.reached(name):
                self._reached[self._order[name]] = 1.0

    def _add_replicas(self) -> None:
        """Adds what the layout has summed over one copy of the weights over all copies."""
        names = self._by_layout
        if self._replicas.size == 1 or not names:
            return
        locals_ = [self._layout.places[name].local for name in names]
        empty = partial(torch.zeros_like, device=self._world.device)  # they may lie elsewhere
        gradients = [self._layout.gradient(name) for name in names]
        found = [empty(p) if g is None else g for p, g in zip(locals_, gradients, strict=True)]
        flat = torch.cat([gradient.reshape(-1) for gradient in found])
        self._replicas.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in found])
        self._summed = {n: part.view(p.shape) for n, part, p in zip(names, parts, locals_, strict=True)}

    def _of_layout(self) -> dict[str, torch.Tensor | None]:
        """The gradients that the layout sums. They are its own: kept here, they would outlive the step."""
        return dict(self._summed) or {name: self._layout.gradient(name) for name in self._by_layout}

    def agrees(self) -> bool:
        """See :class:`Sync`; no where a bucket was sent before all of it had come. The next attempt sends late."""
        return not self._spoiled

    def mark(self) -> int:
        """See :class:`Sync`."""
        return self._layout.mark

    def square_sum(self) -> torch.Tensor:
        """See :class:`Sync`. Of what is the same on several ranks, each answers for one piece."""
        places, replicas = self._layout.places, self._replicas
        parts = []
        for bucket in self._buckets:
            parts += [_piece(one.reshape(-1), places[bucket.names[0]].alike) for one in bucket.sums]
        for name, gradient in self._sparse.items():
            if gradient is not None:
                parts.append(_piece(gradient._values(), places[name].alike))
        for gradient in self._of_layout().values():
            if gradient is not None:
                parts.append(_piece(gradient.reshape(-1), replicas))
        parts = [part for part in parts if part.numel()]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm(parts)
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def reached(self) -> torch.Tensor:
        """See :class:`Sync`."""
        return self._reached

    def scale(self, factor: float) -> None:
        """See :class:`Sync`."""
        if factor == 1.0:
            return
        tensors = [one for bucket in self._buckets for one in bucket.sums]
        tensors += [gradient._values() for gradient in self._sparse.values() if gradient is not None]
        tensors += [gradient for gradient in self._of_layout().values() if gradient is not None]
        if tensors:
            torch._foreach_mul_(tensors, factor)

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """See :class:`Sync`."""
        summed = self._of_layout()
        return {n: summed[n] if n in summed else self._gradient(n) for n in self._layout.places}

    def _gradient(self, name: str) -> torch.Tensor | None:
        if name in self._sparse:
            return self._sparse[name]
        index = self._bucket_of.get(name)
        return None if index is None else self._buckets[index].gradient(name)

    def detach(self) -> None:
        """See :class:`Sync`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _piece(flat: torch.Tensor, alike: Members) -> torch.Tensor:
    """Of what all of ``alike`` have, the part that this rank answers for."""
    return flat.tensor_split(alike.size)[alike.rank]


def _by_holders(places: Mapping[str, Part]) -> list[list[Part]]:
    """Parts whose gradients are added up over the same ranks, and are the same on the same ranks then. Those of most
    ranks come last: whoever waits for them there waits for nobody who still waits elsewhere."""
    found: dict[tuple[int, int], list[Part]] = {}
    for place in places.values():
        found.setdefault((id(place.adds), id(place.alike)), []).append(place)
    return sorted(found.values(), key=lambda parts: (parts[0].adds.size, parts[0].alike.size))


def _held(place: Part) -> TensorSpec:
    """What lies here of a parameter, as a tensor of its own."""
    return dataclasses.replace(place.spec, shape=tuple(place.compute.shape))
