"""What ranks do with a table's rows and a loss's classes that lie in parts on them; see :mod:`stretto.graph.classes`.

Messages have the shape of the logits without the classes. The gradient of logits is made on each rank for its own
classes: the softmax, minus one at the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import nn

from stretto.comm.members import Members
from stretto.graph import localize
from stretto.parallel.messages import Drop, Enter, Heard, Leave, Widely

ELSEWHERE: Final = -1  # no place in this rank's part
MEAN: Final = 1  # torch's number of a reduction; 2: the sum; 0: none

Pieces = Sequence[tuple[int, int]]


def places_of(index: torch.Tensor, pieces: Pieces, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where numbers of the whole, 0 to ``size``, lie in a rank's pieces of it; and which of them do.

    Those of other ranks are at 0, to be overwritten, and a number that is no place at all at -1, so that torch refuses
    it as it does on one device.
    """
    places = torch.where((index >= 0) & (index < size), 0, ELSEWHERE)
    inside = torch.zeros_like(index, dtype=torch.bool)
    start = 0
    for first, last in pieces:
        here = (index >= first) & (index < last)
        places = torch.where(here, index - first + start, places)
        inside |= here
        start += last - first
    return places, inside


def narrowed(whole: torch.Tensor, pieces: Pieces, dim: int = 0) -> torch.Tensor:
    """A rank's part of what is whole."""
    found = [whole.narrow(dim, first, last - first) for first, last in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


class Rows(nn.Module):
    """Rows of this rank's part of a table, and zeros for those of other ranks."""

    def forward(
        self, table: torch.Tensor, index: torch.Tensor, padding: int, pieces: list[tuple[int, int]], size: int
    ) -> torch.Tensor:
        """``table`` [rows here, ...], ``index`` [*] -> [*, ...]; ``padding``: a row that gets no gradient, or -1."""
        places, inside = places_of(index, pieces, size)
        here, known = places_of(torch.tensor([padding]), pieces, size)
        rows = F.embedding(places, table, int(here) if known else None)
        return rows.masked_fill(~inside.unsqueeze(-1), 0)


class Pick(nn.Module):
    """Elements of this rank's part by their numbers in the whole, and zeros for those of other ranks."""

    def forward(
        self, x: torch.Tensor, indices: list[torch.Tensor], dim: int | None, pieces: list[tuple[int, int]], size: int
    ) -> torch.Tensor:
        """Along ``dim`` as ``gather`` does; without one as ``x[indices]`` does, where the last index is in parts."""
        if dim is None:  # there a negative number counts from the end
            last = torch.where(indices[-1] < 0, indices[-1] + size, indices[-1])
            places, inside = places_of(last, pieces, size)
            places = torch.where(places < 0, x.shape[-1], places)
            return x[(*indices[:-1], places)].masked_fill(~inside, 0)
        places, inside = places_of(indices[0], pieces, size)
        return x.gather(dim, places).masked_fill(~inside, 0)


class CrossEntropy(nn.Module):
    """``cross_entropy`` and ``nll_loss`` as torch's, of logits (or logarithms) whose classes lie in parts."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members, self._leave = members, Leave(members)

    def forward(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        raw: bool,
        reduction: int,
        ignored: int,
        smoothing: float,
        dim: int,
        pieces: list[tuple[int, int]],
        size: int,
    ) -> torch.Tensor:
        """``x`` [tokens, classes here, ...], ``target`` [tokens, ...], ``weight`` [classes] or None; ``raw``: logits.

        ``dim`` is that of the classes, of which there are ``size``.
        """
        counted = target != ignored
        named = torch.where(counted, target, 0)
        places, inside = places_of(named, pieces, size)
        if raw:
            total, picked = _ClassesFunction.apply(x, places, inside, dim, self._members)  # type: ignore[no-untyped-call]
        else:
            found = x.gather(dim, places.unsqueeze(dim)).squeeze(dim)
            total, picked = 0.0, self._leave(found.masked_fill(~inside, 0))
        weights = counted.to(x.dtype) if weight is None else torch.where(counted, weight[named], 0)
        loss = self._reduced(_only(counted, (total - picked) * weights), weights, reduction)
        if not smoothing:
            return loss
        along = [-1 if at == dim else 1 for at in range(x.dim())]
        own = x if weight is None else x * narrowed(weight, pieces).view(along)
        of_all = float(size) if weight is None else weight.sum()
        smooth = self._reduced(_only(counted, total * of_all - self._leave(own.sum(dim))), weights, reduction)
        return (1 - smoothing) * loss + smoothing / size * smooth

    @staticmethod
    def _reduced(losses: torch.Tensor, weights: torch.Tensor, reduction: int) -> torch.Tensor:
        if not reduction:
            return losses
        return losses.sum() / weights.sum() if reduction == MEAN else losses.sum()


def _only(counted: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    return losses.masked_fill(~counted, 0)


class _ClassesFunction(torch.autograd.Function):
    """Of logits the logarithm of the sum of their exponentials, and the target's, by one message."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, places: torch.Tensor, inside: torch.Tensor, dim: int, members: Members
    ) -> tuple[torch.Tensor, torch.Tensor]:
        picked = x.gather(dim, places.unsqueeze(dim)).squeeze(dim).masked_fill(~inside, 0)
        found = torch.stack(members.all_gather(torch.stack([x.logsumexp(dim), picked])))
        total = found[:, 0].logsumexp(0)
        ctx.save_for_backward(x, places, inside, total)
        ctx.dim = dim
        return total, found[:, 1].sum(0)

    @staticmethod
    def backward(
        ctx: Any, of_total: torch.Tensor, of_picked: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        x, places, inside, total = ctx.saved_tensors
        gradient = (x - total.unsqueeze(ctx.dim)).exp_().mul_(of_total.unsqueeze(ctx.dim))
        own = of_picked.masked_fill(~inside, 0).unsqueeze(ctx.dim)
        return gradient.scatter_add_(ctx.dim, places.unsqueeze(ctx.dim), own), None, None, None, None


class LogSumExp(nn.Module):
    """``logsumexp`` over dimensions of which one lies in parts."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
        """As torch's."""
        found = cast(torch.Tensor, _LogSumExpFunction.apply(x, dims, self._members))  # type: ignore[no-untyped-call]
        return found if keep else found.squeeze(dims)


class _LogSumExpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: list[int], members: Members) -> torch.Tensor:
        total = torch.stack(members.all_gather(x.logsumexp(dims, keepdim=True))).logsumexp(0)
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, total = ctx.saved_tensors
        return (x - total).exp_().mul_(gradient), None, None


class Softmax(nn.Module):
    """``softmax`` or ``log_softmax`` over a dimension that lies in parts; so does what it gives."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
        """As torch's."""
        return cast(torch.Tensor, _SoftmaxFunction.apply(x, dim, log, self._members))  # type: ignore[no-untyped-call]


class _SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, log: bool, members: Members) -> torch.Tensor:
        total = torch.stack(members.all_gather(x.logsumexp(dim, keepdim=True))).logsumexp(0)
        found = x - total if log else (x - total).exp_()
        ctx.save_for_backward(found)
        ctx.dim, ctx.log, ctx.members = dim, log, members
        return found

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        (found,) = ctx.saved_tensors
        own = gradient if ctx.log else gradient * found
        total = own.sum(ctx.dim, keepdim=True)
        ctx.members.all_reduce(total)
        return (own - found.exp() * total) if ctx.log else found * (gradient - total), None, None, None


class Largest(nn.Module):
    """``amax`` over dimensions of which one lies in parts; those that are equally large share its gradient."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
        """As torch's."""
        found = cast(torch.Tensor, _LargestFunction.apply(x, dims, self._members))  # type: ignore[no-untyped-call]
        return found if keep else found.squeeze(dims)


class _LargestFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: list[int], members: Members) -> torch.Tensor:
        found = torch.stack(members.all_gather(x.amax(dims, keepdim=True))).amax(0)
        ctx.save_for_backward(x, found)
        ctx.dims, ctx.members = dims, members
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, found = ctx.saved_tensors
        here = (x == found).to(gradient.dtype)
        count = here.sum(ctx.dims, keepdim=True)
        ctx.members.all_reduce(count)
        return here * (gradient / count), None, None


class Collect(nn.Module):
    """The whole of what lies in parts on the ranks; its gradient is the same on all, and each takes its part's."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(
        self, x: torch.Tensor, shape: list[int], dim: int, pieces: list[list[tuple[int, int]]]
    ) -> torch.Tensor:
        """``pieces`` of every rank along ``dim`` -> [*shape]."""
        return cast(torch.Tensor, _CollectFunction.apply(x, shape, dim, pieces, self._members))  # type: ignore[no-untyped-call]


class _CollectFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], dim: int, pieces: list[list[tuple[int, int]]], members: Members
    ) -> torch.Tensor:
        ctx.dim, ctx.pieces = dim, pieces[members.rank]
        return gathered(x, shape, dim, pieces, members)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        return narrowed(gradient, ctx.pieces, ctx.dim), None, None, None, None


def gathered(
    x: torch.Tensor, shape: Sequence[int], dim: int, pieces: Sequence[Pieces], members: Members
) -> torch.Tensor:
    """The whole [*shape] of what lies in ``pieces`` along ``dim``, those of every rank."""
    shapes = [[*shape[:dim], sum(last - first for first, last in own), *shape[dim + 1 :]] for own in pieces]
    sizes = [torch.Size(one).numel() for one in shapes]
    flat = x.new_empty(sum(sizes))
    parts = torch.split(flat, sizes)
    parts[members.rank].copy_(x.reshape(-1))
    members.gather_parts(flat, sizes)
    whole = x.new_empty(shape)
    for own, part, local in zip(pieces, parts, shapes, strict=True):
        start = 0
        for first, last in own:
            length = last - first
            whole.narrow(dim, first, length).copy_(part.view(local).narrow(dim, start, length))
            start += length
    return whole


def modules_of(members: Members, heard: Heard | None = None) -> dict[str, nn.Module]:
    """What a rank's graph calls, by the names that it has there. ``heard``: see :class:`Leave`."""
    return {
        localize.ENTER: Enter(members),
        localize.LEAVE: Leave(members, heard),
        localize.DROP: Drop(),
        localize.WIDELY: Widely(),
        localize.ROWS: Rows(),
        localize.PICK: Pick(),
        localize.CROSS_ENTROPY: CrossEntropy(members),
        localize.LOGSUMEXP: LogSumExp(members),
        localize.SOFTMAX: Softmax(members),
        localize.LARGEST: Largest(members),
        localize.COLLECT: Collect(members),
    }
