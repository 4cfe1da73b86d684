"""``sync=exact``: every gradient is added over every rank at every step (synchronous SGD, arXiv 1604.00981).

Parameters whose layout doesn't add gradients itself are packed into flat buckets, in the reverse of the model's order,
which is about the order in which backward makes them (as in PyTorch DDP, arXiv 2006.15704, section 3.2). A parameter's
``grad`` is a view into its bucket, so nothing is copied; on the last microbatch a bucket is sent as soon as it is full,
always in the same order on every rank, while backward goes on. Where the layout communicates in backward (BatchNorm,
FSDP2's reduce-scatters), buckets wait for the end: collectives must come in one order everywhere, and a parameter that
only some ranks use would change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from stretto.comm.group import Group
from stretto.sync._base import Layout

BUCKET_BYTES: Final = 8 * 2**20


class _Bucket:
    """Flat memory for the gradients of some parameters of one type."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        first = parameters[0][1]
        total = sum(parameter.numel() for _, parameter in parameters)
        self.names = tuple(name for name, _ in parameters)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.views: dict[str, torch.Tensor] = {}
        offset = 0
        for name, parameter in parameters:
            self.views[name] = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        self.waiting = 0
        self.work: dist.Work | None = None


class ExactSum:
    """The rule over one layout and group; see :class:`Sync`."""

    def __init__(self, layout: Layout, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._layout = layout
        self._group = group
        own = {
            name: place.local for name, place in layout.places.items() if not place.summed and place.local.requires_grad
        }
        self._parameters = own
        self._buckets = _pack(own, bucket_bytes)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._order = {name: index for index, name in enumerate(layout.places)}
        self._reached = torch.zeros(len(self._order), dtype=torch.float64)
        self._next = 0
        self._sending = False
        self._counting = True
        self._fired: set[str] = set()
        self._late = False  # a gradient came in two parts once: from then on buckets wait for the end of backward
        self._spoiled = False
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name))  # type: ignore[no-untyped-call]
            for name, parameter in own.items()
        ]

    def begin(self) -> None:
        """See :class:`Sync`."""
        self._layout.clear_gradients()
        self._reached.zero_()
        self._next, self._sending, self._spoiled = 0, False, False
        self._fired.clear()
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.waiting, bucket.work = len(bucket.names), None
            for name, view in bucket.views.items():
                self._parameters[name].grad = view

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Sync`."""
        self._sending = last and not self._layout.communicates and not self._late
        self._counting = not ghost
        with self._layout.microbatch(last, ghost), self._group.guard():
            yield

    def _ready(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd has added a gradient into ``parameter``'s view."""
        if self._counting:
            self._reached[self._order[name]] = 1.0
        if not self._sending:
            return
        if name in self._fired:  # as re-entrant checkpoints do, which run a backward within the backward
            self._late = True
            self._spoiled |= self._bucket_of[name].work is not None
            return
        self._fired.add(name)
        self._bucket_of[name].waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            self._send(self._buckets[self._next])

    def _send(self, bucket: _Bucket) -> None:
        bucket.work = self._group.all_reduce(bucket.flat, async_op=True)
        self._next += 1

    def finish(self) -> None:
        """See :class:`Sync`; buckets that some parameter never filled are sent here."""
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        with self._group.guard():
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
        for name, place in self._layout.places.items():
            if place.summed and self._layout.reached(name):
                self._reached[self._order[name]] = 1.0

    def agrees(self) -> bool:
        """See :class:`Sync`; no where a bucket was sent before all of it had come. The next attempt sends late."""
        return not self._spoiled

    def mark(self) -> int:
        """See :class:`Sync`."""
        return self._layout.mark

    def square_sum(self) -> torch.Tensor:
        """See :class:`Sync`. Of a bucket, which is the same everywhere, each rank answers for one part."""
        parts = [bucket.flat.tensor_split(self._group.size)[self._group.rank] for bucket in self._buckets]
        for name, place in self._layout.places.items():
            if place.summed and (gradient := self._layout.gradient(name)) is not None:
                parts.append(gradient)
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
        tensors = [bucket.flat for bucket in self._buckets]
        for name, place in self._layout.places.items():
            if place.summed and (gradient := self._layout.gradient(name)) is not None:
                tensors.append(gradient)
        if tensors:
            torch._foreach_mul_(tensors, factor)

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """See :class:`Sync`."""
        return {
            name: self._layout.gradient(name) if place.summed else self._view(name)
            for name, place in self._layout.places.items()
        }

    def _view(self, name: str) -> torch.Tensor | None:
        bucket = self._bucket_of.get(name)
        return None if bucket is None else bucket.views[name]

    def detach(self) -> None:
        """See :class:`Sync`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _pack(parameters: Mapping[str, nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of at most ``bucket_bytes`` (or one parameter) and one type, in the reverse of the given order."""
    groups: list[list[tuple[str, nn.Parameter]]] = []
    filled = 0
    for name, parameter in reversed(list(parameters.items())):
        size = parameter.numel() * parameter.element_size()
        same = bool(groups) and groups[-1][0][1].dtype == parameter.dtype
        if not same or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, parameter))
        filled += size
    return [_Bucket(group) for group in groups]
