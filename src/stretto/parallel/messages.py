"""What ranks that cut a layer between them say to one another inside it; see :mod:`stretto.graph.localize`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from stretto.comm.members import Members


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
    """Each rank's sum over its part, added up; the gradient of the sum is that of each."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``."""
        return cast(torch.Tensor, _LeaveFunction.apply(x, self._members))  # type: ignore[no-untyped-call]


class _LeaveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        members.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


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
