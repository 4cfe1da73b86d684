"""The collectives of the shared-memory backend, each as a list of steps.

A collective is a generator. It writes this member's buffer and yields; when it goes on, everyone's buffer of that step
may be read, and its own next one written. Tensors are flat and contiguous here. Whatever is larger than a buffer goes
in pieces. Every element is reduced by one member, in rank order, so all members hold the same bits, the same each time;
bf16 and fp16 are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import torch

Steps = Iterator[None]

# By the name of the operation, in lower case; each takes (a, b, out=).
COMBINE: Final[Mapping[str, Callable[..., torch.Tensor]]] = MappingProxyType(
    {"sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
)
_LOW: Final = (torch.bfloat16, torch.float16)
_SMALL_BYTES: Final = 1 << 15  # up to here everyone adds everything up: one step instead of two
_LINE: Final = 64  # pieces begin at cache lines


class Exchange(Protocol):
    """What a collective sees of the segment."""

    rank: int
    size: int

    def mine(self) -> torch.Tensor:
        """Where to write for the next step [bytes, uint8]."""
        ...

    def of(self, rank: int) -> torch.Tensor:
        """What ``rank`` wrote for the step before this [bytes, uint8]."""
        ...


def barrier() -> Steps:
    """One step without data."""
    yield


def all_gather(ex: Exchange, outputs: Sequence[torch.Tensor], own: torch.Tensor) -> Steps:
    """Everyone's ``own`` into ``outputs[rank]``; sizes may differ from rank to rank."""
    sources, targets = _bytes(own), [_bytes(output) for output in outputs]
    in_place = sources.data_ptr() == targets[ex.rank].data_ptr()  # as FSDP2 does
    room = ex.mine().numel()
    for start in range(0, _at_least_one(targets), room):
        piece = sources[start : start + room]
        if ex.size > 1:
            ex.mine()[: piece.numel()].copy_(piece)
        if not in_place:
            targets[ex.rank][start : start + room].copy_(piece)
        yield
        for rank, target in enumerate(targets):
            if rank != ex.rank:
                there = target[start : start + room]
                there.copy_(ex.of(rank)[: there.numel()])


def broadcast(ex: Exchange, tensor: torch.Tensor, root: int) -> Steps:
    """``tensor`` of ``root``, in place."""
    cells = _bytes(tensor)
    room = ex.mine().numel()
    for start in range(0, _at_least_one([cells]), room):
        piece = cells[start : start + room]
        if ex.rank == root and ex.size > 1:
            ex.mine()[: piece.numel()].copy_(piece)
        yield
        if ex.rank != root:
            piece.copy_(ex.of(root)[: piece.numel()])


def reduce_scatter(ex: Exchange, output: torch.Tensor, inputs: Sequence[torch.Tensor], how: str) -> Steps:
    """``inputs[rank]`` of everyone, combined, into rank's ``output``; sizes may differ from rank to rank."""
    room = _room(ex, output)
    for start in range(0, _at_least_one(inputs), room):
        pieces = [source[start : start + room] for source in inputs]
        _put(ex, pieces, room)
        yield
        out = output[start : start + room]
        parts = [pieces[ex.rank] if rank == ex.rank else _part(ex, rank, out, room) for rank in range(ex.size)]
        _combine(out, parts, how)


def all_reduce(ex: Exchange, tensor: torch.Tensor, how: str) -> Steps:
    """Everyone's ``tensor``, combined, in place."""
    if ex.size == 1:
        yield
        return
    if tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
        _view(ex.mine(), tensor).copy_(tensor)
        yield
        _combine(tensor, [_view(ex.of(rank), tensor) for rank in range(ex.size)], how)
        return
    room = _room(ex, tensor)
    for start in range(0, tensor.numel(), room * ex.size):
        rest = min(tensor.numel() - start, room * ex.size)
        share = -(-rest // ex.size)
        pieces = list(torch.split(tensor[start : start + rest], share))
        pieces += [tensor[:0]] * (ex.size - len(pieces))
        _put(ex, pieces, room)
        yield
        own = pieces[ex.rank]
        parts = [own if rank == ex.rank else _part(ex, rank, own, room) for rank in range(ex.size)]
        _combine(_view(ex.mine(), own), parts, how)
        yield
        for rank, piece in enumerate(pieces):
            piece.copy_(_view(ex.of(rank), piece))


def reduce(ex: Exchange, tensor: torch.Tensor, root: int, how: str) -> Steps:
    """Everyone's ``tensor``, combined, into that of ``root``; the others keep theirs."""
    if ex.size == 1:
        yield
        return
    room = ex.mine().numel() // tensor.element_size()
    for start in range(0, max(1, tensor.numel()), room):
        piece = tensor[start : start + room]
        _view(ex.mine(), piece).copy_(piece)
        yield
        if ex.rank == root:
            _combine(piece, [_view(ex.of(rank), piece) for rank in range(ex.size)], how)


def all_to_all(ex: Exchange, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    """``inputs[rank]`` goes to rank, ``outputs[rank]`` came from it; all of one size."""
    sources, targets = [_bytes(one) for one in inputs], [_bytes(one) for one in outputs]
    room = _room(ex, sources[0])
    for start in range(0, _at_least_one(sources), room):
        pieces = [source[start : start + room] for source in sources]
        _put(ex, pieces, room)
        targets[ex.rank][start : start + room].copy_(pieces[ex.rank])
        yield
        for rank, target in enumerate(targets):
            if rank != ex.rank:
                there = target[start : start + room]
                there.copy_(_part(ex, rank, there, room))


def scatter(ex: Exchange, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Steps:
    """``inputs[rank]`` of ``root`` into rank's ``output``; only ``root`` gives any."""
    target = _bytes(output)
    room = _room(ex, target)
    sources = [_bytes(one) for one in inputs]
    for start in range(0, _at_least_one([target]), room):
        out = target[start : start + room]
        if ex.rank == root:
            pieces = [source[start : start + room] for source in sources]
            _put(ex, pieces, room)
            out.copy_(pieces[root])
        yield
        if ex.rank != root:
            out.copy_(_part(ex, root, out, room))


def _combine(out: torch.Tensor, parts: list[torch.Tensor], how: str) -> None:
    """Rank 0's part and rank 1's, then rank 2's and so on, into ``out``, which may be one of them."""
    combine = COMBINE[how]
    low = out.dtype in _LOW
    total = parts[0].float() if low else out
    if len(parts) == 1:
        total.copy_(parts[0])
    elif low:
        for part in parts[1:]:
            combine(total, part.float(), out=total)
    else:
        later = [part.clone() if part.data_ptr() == out.data_ptr() else part for part in parts[2:]]
        combine(parts[0], parts[1], out=out)
        for part in later:
            combine(out, part, out=out)
    if how == "avg":
        total.div_(len(parts))
    if low:
        out.copy_(total)


def _put(ex: Exchange, pieces: Sequence[torch.Tensor], room: int) -> None:
    """Lays the others' pieces out in the own buffer, ``room`` elements apart; the own piece stays where it is."""
    for rank, piece in enumerate(pieces):
        if rank != ex.rank:
            start = rank * room * piece.element_size()
            _view(ex.mine()[start:], piece).copy_(piece)


def _part(ex: Exchange, rank: int, like: torch.Tensor, room: int) -> torch.Tensor:
    """The piece for this member in the buffer of ``rank``."""
    return _view(ex.of(rank)[ex.rank * room * like.element_size() :], like)


def _room(ex: Exchange, like: torch.Tensor) -> int:
    """Elements of each of ``size`` pieces that share one buffer."""
    return ex.mine().numel() // ex.size // _LINE * _LINE // like.element_size()


def _view(cells: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first cells as a flat tensor of ``like``'s type and length."""
    return cells[: like.numel() * like.element_size()].view(like.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _at_least_one(tensors: Sequence[torch.Tensor]) -> int:
    """The most elements of any; at least 1, as even an empty collective takes a step."""
    return max(1, *(tensor.numel() for tensor in tensors))
