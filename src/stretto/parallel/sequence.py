"""What ranks say to one another about values that lie in parts along a sequence; see :mod:`stretto.graph.regions`.

An all-reduce is a reduce-scatter and an all-gather. So where partial sums are added up each rank gets its own places
alone, and all of them are gathered where the next cut layer begins: as many bytes as before (Korthikanti et al., arXiv
2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.graph import localize
from stretto.parallel.messages import Heard
from stretto.parallel.spread import Pieces, gathered, narrowed


def scattered(x: torch.Tensor, dim: int, pieces: Sequence[Pieces], members: Members) -> torch.Tensor:
    """The sum of all ranks' ``x``, of which each gets its own pieces along ``dim``."""
    parts = [narrowed(x, own, dim) for own in pieces]
    sizes = [part.numel() for part in parts]
    flat = torch.cat([part.reshape(-1) for part in parts])
    members.reduce_scatter(flat, sizes)
    own = torch.split(flat, sizes)[members.rank]
    return own.view(parts[members.rank].shape).clone()  # without the others' parts, which it would keep in memory


class Scatter(nn.Module):
    """Each rank's sum over its part of a layer, added up; every rank keeps its own places of it. ``heard``: see
    :class:`Leave`."""

    def __init__(self, members: Members, heard: Heard | None = None) -> None:
        super().__init__()
        self._members, self._heard = members, heard

    def forward(self, x: torch.Tensor, shape: list[int], dim: int, pieces: list[Pieces]) -> torch.Tensor:
        """``x`` [*shape] -> this rank's pieces along ``dim``."""
        return cast(torch.Tensor, _ScatterFunction.apply(x, (shape, dim, pieces), self._members, self._heard))  # type: ignore[no-untyped-call]


class _ScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        lying: tuple[list[int], int, list[Pieces]],
        members: Members,
        heard: Heard | None,
    ) -> torch.Tensor:
        shape, dim, pieces = lying
        ctx.lying = shape, dim, pieces, members

        def ask() -> torch.Tensor:
            return scattered(x, dim, pieces, members)

        return ask() if heard is None else heard.of(ask)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gathered(gradient, *ctx.lying), None, None, None


class Gather(nn.Module):
    """The whole of what lies in parts; each rank uses it for its own part of a layer, so its gradient is their sum."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor, shape: list[int], dim: int, pieces: list[Pieces]) -> torch.Tensor:
        """This rank's pieces along ``dim`` -> [*shape]."""
        return cast(torch.Tensor, _GatherFunction.apply(x, shape, dim, pieces, self._members))  # type: ignore[no-untyped-call]


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], dim: int, pieces: list[Pieces], members: Members
    ) -> torch.Tensor:
        ctx.lying = dim, pieces, members
        return gathered(x, shape, dim, pieces, members)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return scattered(gradient, *ctx.lying), None, None, None, None


class Own(nn.Module):
    """This rank's places of what is whole on every rank; its gradient is gathered from all."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor, shape: list[int], dim: int, pieces: list[Pieces]) -> torch.Tensor:
        """``x`` [*shape] -> this rank's pieces along ``dim``."""
        return cast(torch.Tensor, _OwnFunction.apply(x, shape, dim, pieces, self._members))  # type: ignore[no-untyped-call]


class _OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], dim: int, pieces: list[Pieces], members: Members
    ) -> torch.Tensor:
        ctx.lying = shape, dim, pieces, members
        return narrowed(x, pieces[members.rank], dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return gathered(gradient, *ctx.lying), None, None, None, None


def sequence_modules(members: Members, heard: Heard | None = None) -> dict[str, nn.Module]:
    """What a graph with regions calls beside the rest, by the names that it has there. ``heard``: see
    :class:`Scatter`."""
    return {
        localize.SCATTER: Scatter(members, heard),
        localize.GATHER: Gather(members),
        localize.OWN: Own(members),
    }
