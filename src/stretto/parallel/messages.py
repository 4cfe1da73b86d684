"""What ranks that cut a layer between them say to one another inside it; see :mod:`stretto.graph.localize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from stretto.comm.members import Members


class Heard:
    """What forward hears from the others, so that it can be computed again without a message."""

    def __init__(self) -> None:
        self._notes: list[torch.Tensor] | None = None
        self._replays: Iterator[torch.Tensor] | None = None

    @contextmanager
    def noting(self, into: list[torch.Tensor]) -> Iterator[None]:
        """Notes all that is heard inside."""
        self._notes = into
        try:
            yield
        finally:
            self._notes = None

    @contextmanager
    def replaying(self, noted: list[torch.Tensor]) -> Iterator[None]:
        """Forward inside hears that again, and asks nobody."""
        self._replays = iter(noted)
        try:
            yield
        finally:
            self._replays = None

    def of(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``ask`` gives, or gave the first time."""
        if self._replays is not None:
            return next(self._replays).detach()
        value = ask()
        if self._notes is not None:
            self._notes.append(value.detach())  # itself, it would hold its history
        return value


class Enter(nn.Module):
    """The same on all ranks; each uses it for its own part, so its gradient is the sum of theirs."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return cast(torch.Tensor, _EnterFunction.apply(x, self._members))  # type: ignore[no-untyped-call]


class _EnterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.members.all_reduce(total)
        return total, None


class Leave(nn.Module):
    """Each rank's sum over its part, added up; the gradient of the sum is that of each.

    Args:
        heard: keeps the sums where forward is computed again; None: they are added up again then.
    """

    def __init__(self, members: Members, heard: Heard | None = None) -> None:
        super().__init__()
        self._members, self._heard = members, heard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``."""
        return cast(torch.Tensor, _LeaveFunction.apply(x, self._members, self._heard))  # type: ignore[no-untyped-call]


class _LeaveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members, heard: Heard | None) -> torch.Tensor:
        def ask() -> torch.Tensor:
            total = x.clone(memory_format=torch.contiguous_format)
            members.all_reduce(total)
            return total

        return ask() if heard is None else heard.of(ask)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class Widely(nn.Module):
    """A convolution of values in a lower type that gives float32: what ranks add up is rounded once, as on one device.

    Such values are exact in float32, and in the TF32 in which torch convolves on an accelerator.
    """

    def forward(
        self, convolve: Callable[..., torch.Tensor], low: torch.dtype, x: torch.Tensor, weight: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        """``convolve(x, weight, *rest)`` of what ``low`` holds of both."""
        with torch.autocast(x.device.type, enabled=False):
            return convolve(x.to(low).float(), weight.to(low).float(), *rest)


class Drop(nn.Module):
    """Dropout of a part: all ranks draw for the whole tensor, as one device does, and each uses its piece."""

    def forward(
        self,
        x: torch.Tensor,
        rate: float,
        shape: list[int],
        dim: int,
        pieces: list[tuple[int, int]],
        steps: list[int],
    ) -> torch.Tensor:
        """``x`` with elements at zero, the others larger. ``steps``: of the whole in memory, as numbers are drawn in
        the order in which it lies there."""
        whole = torch.empty_strided(shape, steps, dtype=x.dtype, device="meta")
        keep = torch.empty_like(whole, device=x.device).bernoulli_(1 - rate).div_(1 - rate)
        return x * torch.cat([keep.narrow(dim, first, last - first) for first, last in pieces], dim)
