"""The contract of a sync rule, and what it needs of the layout under it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.state import Shares, TensorSpec


class Part(Protocol):
    """This rank's part of one parameter; see `parallel.Place`."""

    @property
    def spec(self) -> TensorSpec:
        """Its logical shape and type, which is the type that gradients are added in."""

    @property
    def local(self) -> nn.Parameter:
        """A plain parameter over the part."""

    @property
    def compute(self) -> nn.Parameter:
        """The module's own parameter, where backward leaves the gradient."""

    @property
    def summed(self) -> bool:
        """Whether the layout itself adds the gradient over the ranks that cut it."""

    @property
    def shares(self) -> Shares | None:
        """Which part of it each rank updates; None where each updates all of it."""

    @property
    def sparse(self) -> bool:
        """Whether its gradients are sparse."""

    @property
    def elsewhere(self) -> bool:
        """Whether it isn't used on this rank at all."""

    @property
    def adds(self) -> Members:
        """Those whose gradients of the part add up."""

    @property
    def alike(self) -> Members:
        """Those that hold the same part, and so the same sum."""

    @property
    def copies(self) -> Members | None:
        """Those over whom the sums over ``adds`` are to be added up too."""


class Ranks(Protocol):
    """With whom a rank shares what."""

    @property
    def world(self) -> Members:
        """All that share the global batch."""

    @property
    def replicas(self) -> Members:
        """Those that hold the same part of another copy of the weights."""


class Layout(Protocol):
    """A model laid out over a group, as far as a sync rule looks; `parallel.Applied` is one."""

    @property
    def ranks(self) -> Ranks:
        """With whom this rank shares what."""

    @property
    def places(self) -> Mapping[str, Part]:
        """Every parameter by name, in the model's order; the same names on every rank."""

    @property
    def communicates(self) -> bool:
        """Whether its forward or backward enter collectives. Then nothing else may be sent meanwhile: which gradients
        come, and when, may differ between ranks, and collectives must come in one order on all."""

    def microbatch(self, last: bool, ghost: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one microbatch."""

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of this rank's part of a parameter."""

    @property
    def mark(self) -> int:
        """A number below 2**20 that stands for the order of its collectives since the last clearing."""

    def reached(self, name: str) -> bool:
        """Whether a real sample's gradient has reached a ``summed`` parameter on this rank since the last clearing."""

    def clear_gradients(self) -> None:
        """Forgets all gradients that the layout itself holds."""


class Sync(Protocol):
    """Turns the gradients of all ranks into one. Every rank makes the same calls in the same order.

    One step: ``begin``, then a ``microbatch`` around each forward and backward, ``finish``, and then either the
    optimizer reads ``gradients`` (after ``scale``) or the step is discarded; ``begin`` forgets either way.
    """

    def begin(self) -> None:
        """Starts a step with all gradients zero."""

    def microbatch(self, last: bool, ghost: bool, ends: bool = True) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a microbatch, or where a rank has several stages of it, of one; a ghost's
        gradients count for nothing.

        Args:
            ends: it is all of the microbatch that was left to this rank: ranks with other numbers of stages send as
                often as one another.
        """

    def finish(self) -> None:
        """Returns when every gradient on this rank is the sum over all ranks. Raises PeerLost."""

    def agrees(self) -> bool:
        """Whether this rank's gradients may be used; if not, the step is discarded and run again."""

    def mark(self) -> int:
        """A number below 2**20 that stands for the collectives the layout entered; it must be the same on all ranks."""

    def square_sum(self) -> torch.Tensor:
        """This rank's share of the squared norm of all gradients, float64, 0-dimensional; the shares add up."""

    def reached(self) -> torch.Tensor:
        """One float64 a parameter, in order: 1 where a gradient reached it on this rank in this step. Sums over ranks
        tell which parameters took part at all: the others keep ``None`` as one device would leave them."""

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, in place."""

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Each parameter's gradient for this rank's part of it."""

    def detach(self) -> None:
        """Takes its hooks off the module."""
