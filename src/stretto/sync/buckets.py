"""Flat memory for gradients: kept through the step, or passing through on the way to the ranks that need them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.distributed as dist

from stretto.comm.members import Members
from stretto.state import Box, Bucket
from stretto.sync._base import Part


class GradientBucket(ABC):
    """The gradients of some parameters, summed over all members. Every member must make the same calls in one order.

    ``own`` holds the sums of this member's part of the bucket, where they lie together.
    """

    own: torch.Tensor

    def __init__(self, bucket: Bucket, parts: Mapping[str, Part], members: Members) -> None:
        self.names = bucket.names
        self._bucket, self._members = bucket, members
        self._parts = {name: parts[name] for name in bucket.names}
        first = self._parts[bucket.names[0]]
        self._dtype: torch.dtype = getattr(torch, first.spec.dtype)
        self._device = first.compute.device
        self._part = bucket.part(members.rank)

    def _reduce(self, flat: torch.Tensor) -> dist.Work | None:
        if self._bucket.sizes is None:
            return self._members.all_reduce(flat, async_op=True)
        return self._members.reduce_scatter(flat, self._bucket.sizes, async_op=True)

    def _whole(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The place of a whole parameter in memory for the whole bucket."""
        compute, first = self._parts[name].compute, self._bucket.offsets[name]
        return flat[first : first + compute.numel()].view(compute.shape)

    @abstractmethod
    def begin(self) -> None:
        """Starts a step: all zero."""

    @abstractmethod
    def arrived(self, name: str) -> None:
        """Autograd has added a gradient at the parameter ``name``."""

    @abstractmethod
    def send(self) -> None:
        """Starts the sum over all members of what has arrived."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when every sum that was started is in ``own``."""

    def add_copies(self) -> None:
        """Adds up what lies in ``own`` over the copies of the weights, once all of it has settled."""
        copies = self._parts[self.names[0]].copies
        if copies is not None and self.own.numel():
            copies.all_reduce(self.own)

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sums of this member's part, as they lie in memory."""
        return [self.own]

    def gradient(self, name: str) -> torch.Tensor | None:
        """The summed gradient of this member's share of a parameter, in the share's shape; None where none came."""
        part = self._parts[name]
        box = Box.whole(part.local.shape) if part.shares is None else part.shares[self._members.rank]
        if not box.numel:
            return self.own[:0].view(box.shape)
        skipped = box.starts[0] * math.prod(part.compute.shape[1:]) if box.starts else 0
        first = self._bucket.offsets[name] + skipped - self._part.start
        return self.own[first : first + box.numel].view(box.shape)


class Kept(GradientBucket):
    """The whole bucket stays in memory, so that several microbatches are added up and sent once.

    A parameter's first gradient in a step is copied into it, and ``grad`` becomes a view of it, which autograd adds the
    others to. (Zeroes to begin with, and adding to them, would cost twice the traffic.) Gradients of a lower precision
    are added by hand.
    """

    def __init__(self, bucket: Bucket, parts: Mapping[str, Part], members: Members) -> None:
        super().__init__(bucket, parts, members)
        self._flat = torch.empty(bucket.numel, dtype=self._dtype, device=self._device)
        self.own = self._flat[self._part]
        self._views = {name: self._whole(self._flat, name) for name in self.names}
        self._missing = set(self.names)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """See :class:`GradientBucket`."""
        self._work = None
        self._missing = set(self.names)
        for part in self._parts.values():
            part.compute.grad = None

    def arrived(self, name: str) -> None:
        """See :class:`GradientBucket`."""
        compute, view = self._parts[name].compute, self._views[name]
        if compute.grad is None or compute.grad is view:
            return
        if compute.dtype == self._dtype:
            view.copy_(compute.grad)
            compute.grad = view
        else:
            view.copy_(compute.grad) if name in self._missing else view.add_(compute.grad)
            compute.grad = None
        self._missing.discard(name)

    def send(self) -> None:
        """See :class:`GradientBucket`; once a step."""
        for name in self._missing:
            self._views[name].zero_()
        self._work = self._reduce(self._flat)

    def settle(self) -> None:
        """See :class:`GradientBucket`."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class Lone(GradientBucket):
    """Of one member alone there is nothing to add up: gradients stay where autograd leaves them.

    Those of a lower precision are added by hand.
    """

    def __init__(self, bucket: Bucket, parts: Mapping[str, Part], members: Members) -> None:
        super().__init__(bucket, parts, members)
        self._wide: dict[str, torch.Tensor] = {}

    @property
    def sums(self) -> list[torch.Tensor]:
        """See :class:`GradientBucket`."""
        found = (self._gradient(name) for name in self.names)
        return [gradient for gradient in found if gradient is not None]

    def begin(self) -> None:
        """See :class:`GradientBucket`."""
        self._wide = {}
        for part in self._parts.values():
            part.compute.grad = None

    def arrived(self, name: str) -> None:
        """See :class:`GradientBucket`."""
        compute = self._parts[name].compute
        if compute.dtype == self._dtype or compute.grad is None:
            return
        if name in self._wide:
            self._wide[name].add_(compute.grad)
        else:
            self._wide[name] = compute.grad.to(self._dtype)
        compute.grad = None

    def send(self) -> None:
        """See :class:`GradientBucket`; nothing goes out."""

    def settle(self) -> None:
        """See :class:`GradientBucket`."""

    def gradient(self, name: str) -> torch.Tensor | None:
        """See :class:`GradientBucket`."""
        gradient, shares = self._gradient(name), self._parts[name].shares
        return gradient if gradient is None or shares is None else gradient.view(shares[0].shape)

    def _gradient(self, name: str) -> torch.Tensor | None:
        return self._wide.get(name, self._parts[name].compute.grad)


class Passing(GradientBucket):
    """Only this member's part of the sum stays; the rest of the bucket lives from a send to its end.

    So the gradients of the whole model never lie here at once (ZeRO, arXiv 1910.02054, section 5.2).
    """

    def __init__(self, bucket: Bucket, parts: Mapping[str, Part], members: Members) -> None:
        super().__init__(bucket, parts, members)
        self.own = torch.zeros(self._part.stop - self._part.start, dtype=self._dtype, device=self._device)
        self._moving: tuple[torch.Tensor, dist.Work | None] | None = None

    def begin(self) -> None:
        """See :class:`GradientBucket`."""
        self._moving = None
        self.own.zero_()
        for part in self._parts.values():
            part.compute.grad = None

    def arrived(self, name: str) -> None:
        """See :class:`GradientBucket`; autograd's tensor is taken when the bucket is sent."""

    def send(self) -> None:
        """See :class:`GradientBucket`; after each microbatch."""
        self.settle()
        flat = torch.empty(self._bucket.numel, dtype=self._dtype, device=self._device)
        for name, part in self._parts.items():
            place = self._whole(flat, name)
            if part.compute.grad is None:
                place.zero_()
            else:
                place.copy_(part.compute.grad)
                part.compute.grad = None
        self._moving = (flat, self._reduce(flat))

    def settle(self) -> None:
        """See :class:`GradientBucket`."""
        if self._moving is not None:
            flat, work = self._moving
            if work is not None:
                work.wait()
            self.own.add_(flat[self._part])
            self._moving = None
