"""Members of an epoch that communicate: collectives, and what a lost peer looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from stretto.comm.shm_group import SharedMemoryGroup
from stretto.comm.shm_memory import PAGE, SharedMemory, Unavailable
from stretto.comm.shm_segment import Lost
from stretto.errors import PeerLost

_LOST: Final = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "nccl comm",
)


@dataclass(frozen=True)
class Awaited:
    """A message from one member that another waits for.

    Args:
        what: in words.
        sender: its rank in the epoch; None where this member sends it.
        after: how many pieces of work the sender has behind it once it is sent.
    """

    what: str
    sender: int | None
    after: int


@dataclass
class Broken:
    """What is known of an epoch's group on this member; shared by all that stand on it, none of which need hold another
    for it.

    Args:
        so: it was broken.
        awaited: a message that is waited for.
        passed: how many pieces of work that send messages this member has behind it.
    """

    so: bool = False
    awaited: Awaited | None = None
    passed: int = 0


class _Closed:
    """Stands where torch's group was."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("the group of this epoch was closed; nothing can be sent any more")


_CLOSED: Final = _Closed()


class Members:
    """Some members of an epoch that communicate. Every one of them must make the same calls in the same order.

    Args:
        rank: this member's place among them.
        size: how many they are.
        device: where the tensors lie that they send.
        process_group: torch's group over them; None where it is one member alone, who sends nothing.
        broken: whether the epoch's group was broken.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        broken: Broken,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group, self._broken = process_group, broken

    def let_go(self) -> None:
        """Of torch's group; who is alone has none."""
        self._group = None if self._group is None else cast(dist.ProcessGroup, _CLOSED)

    def alone(self) -> Members:
        """This member by itself, who sends nothing."""
        return Members(0, 1, self.device, None, self._broken)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group. Raises RuntimeError for one member alone that was given none."""
        if self._group is None:
            raise RuntimeError("a lone member has no process group")
        return self._group

    @property
    def over_gloo(self) -> bool:
        """Whether Gloo carries their calls, which has fewer kinds than others."""
        return self._group is not None and dist.get_backend(self._group) == "gloo"

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> dist.Work | None:
        """Sums ``tensor`` over all members, in place; with ``async_op`` returns what to wait for."""
        if self._group is None:
            return None
        with self.guard():
            work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=async_op)
        return work

    def reduce_scatter(self, flat: torch.Tensor, sizes: Sequence[int], async_op: bool = False) -> dist.Work | None:
        """Sums ``flat`` [sum of sizes] over all members; each keeps its own part of ``sizes``, in place.

        The other parts are of no use afterwards. Members may have parts of different sizes, and none at all.
        """
        if self._group is None:
            return None
        if self.over_gloo:
            return self.all_reduce(flat, async_op)  # so does Gloo itself, on a copy (measured: 1.4 times its cost)
        parts = list(torch.split(flat, list(sizes)))
        with self.guard():
            work: dist.Work | None = dist.reduce_scatter(parts[self.rank], parts, group=self._group, async_op=async_op)
        return work

    def gather_parts(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        """The reverse: fills ``flat`` [sum of sizes] with every member's part, in place."""
        if self._group is None:
            return
        parts = list(torch.split(flat, list(sizes)))
        with self.guard():
            if not self.over_gloo:
                dist.all_gather(parts, parts[self.rank], group=self._group)
                return
            if len(set(sizes)) == 1 and flat.numel():
                # Both ways at once, where Gloo at times ends one broadcast before the next. As bytes, of any type.
                whole, own = flat.view(torch.uint8), parts[self.rank].view(torch.uint8)
                dist.all_gather_into_tensor(whole, own, group=self._group)
                return
            # Gloo gathers only parts of one size.
            works = [
                dist.broadcast(part, group_src=index, group=self._group, async_op=True)
                for index, part in enumerate(parts)
                if part.numel()
            ]
            for work in works:
                work.wait()

    def all_gather_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all members' ``tensor`` (sparse COO of one shape), coalesced: the same on every member."""
        mine = tensor.coalesce()
        indices, values = mine.indices(), mine.values()
        counts = [int(count) for count in self.all_gather(torch.tensor([indices.shape[1]], device=self.device))]
        if self._group is not None:
            longest = max(counts)
            padded = indices.new_zeros(indices.shape[0], longest)
            padded[:, : indices.shape[1]] = indices
            wide = values.new_zeros(longest, *values.shape[1:])
            wide[: values.shape[0]] = values
            found, rows = self.all_gather(padded), self.all_gather(wide)
            indices = torch.cat([part[:, :count] for part, count in zip(found, counts, strict=True)], 1)
            values = torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])
        return torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every member's ``tensor`` (same shape and type everywhere), in rank order."""
        if self._group is None:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.guard():
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """``tensor`` of member ``source``, in place."""
        if self._group is None:
            return tensor
        with self.guard():
            dist.broadcast(tensor, group_src=source, group=self._group)
        return tensor

    def broadcast_json(self, value: Any = None) -> Any:
        """Member 0's ``value`` on every member; must be JSON. What the others pass is not looked at."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = self.broadcast(torch.tensor([len(text)]))
        cells = torch.zeros(int(size.item()), dtype=torch.uint8)
        if self.rank == 0:
            cells.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return json.loads(bytes(self.broadcast(cells).tolist()))

    def gather_json(self, value: Any) -> list[Any]:
        """Every member's ``value``, which must be JSON, in rank order."""
        text = json.dumps(value).encode()
        sizes = [int(size.item()) for size in self.all_gather(torch.tensor([len(text)]))]
        cells = torch.zeros(max(sizes), dtype=torch.uint8)
        cells[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.all_gather(cells)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

    def shared_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory [num_bytes, uint8] that all members see alike, zero at first; it is freed with the last view of it.

        Raises:
            Unavailable: on every member alike, where they don't talk over shared memory or have not so much of it.
        """
        if not isinstance(self._group, SharedMemoryGroup):
            raise Unavailable("the workers don't talk over shared memory")
        with SharedMemory(PAGE + num_bytes) as memory:
            offer = self.broadcast_json(memory.offer() if self.rank == 0 else None)
            why = offer["why"] or memory.take(offer)
            for rank, found in enumerate(self.gather_json(why)):
                if found:
                    raise Unavailable(f"rank {rank}: {found}")
        return torch.frombuffer(memory.mapped, dtype=torch.uint8)[PAGE:]

    def check_peers(self) -> None:
        """Raises Lost where another member has died or left, as far as shared memory tells."""
        if isinstance(self._group, SharedMemoryGroup):
            self._group.check_peers()

    def barrier(self) -> None:
        """Returns when every member has come."""
        self.all_reduce(torch.zeros(1))

    def maximum(self, value: float) -> float:
        """The largest ``value`` of all members."""
        return max(float(cell) for cell in self.all_gather(torch.tensor([value], dtype=torch.float64)))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turns what torch raises for a lost peer or a broken group, in here or inside a backward, into PeerLost."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if self._broken.so or isinstance(error, Lost) or any(word in text for word in _LOST):
                raise PeerLost(f"rank {self.rank}: a collective ended early: {error}") from error
            raise
