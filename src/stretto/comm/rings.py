"""Messages between two processes of one host: a ring of shared memory for each direction.

The sender copies a message into the ring and goes on; the receiver copies it out when it looks. Only the sender moves
the head, only the receiver the tail, so neither locks. A message is a header (tag and bytes) and its bytes; one that is
larger than the ring passes through it in pieces. On x86-64 stores become visible in their order, which is all that it
takes (as in :mod:`.shm_segment`, which says where it can run).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from stretto.comm.shm_segment import Futex

HEADER_BYTES: Final = 128  # the head and the tail, each in a cache line of its own
_FRAME: Final = 2  # words before the bytes of a message
_HEAD, _TAIL = 0, 8
SPINS: Final = 200


class Ring:
    """One direction. ``memory`` [bytes, uint8] is the same on both sides, all zero at first."""

    def __init__(self, memory: torch.Tensor, futex: Futex) -> None:
        header: Any = memory[:HEADER_BYTES].numpy()
        self._words = memoryview(header).cast("Q")
        self._cells = memory[HEADER_BYTES:]
        self._address, self._futex = memory.data_ptr(), futex
        self.capacity = self._cells.numel()

    def put(self, data: torch.Tensor) -> int:
        """Copies the first bytes of ``data`` in, as many as there is room for; returns how many."""
        head = self._words[_HEAD]
        count = min(data.numel(), self.capacity - (head - self._words[_TAIL]))
        self._copy(head, count, lambda cells, first, last: cells.copy_(data[first:last]))
        if count:
            self._words[_HEAD] = head + count
            self._futex.wake(self._address)
        return count

    def take(self, into: torch.Tensor) -> int:
        """Copies what has come to the start of ``into``, as much as fits; returns how many bytes."""
        tail = self._words[_TAIL]
        count = min(into.numel(), self._words[_HEAD] - tail)
        self._copy(tail, count, lambda cells, first, last: into[first:last].copy_(cells))
        if count:
            self._words[_TAIL] = tail + count
            self._futex.wake(self._address + 8 * _TAIL)
        return count

    def _copy(self, at: int, count: int, copy: Callable[[torch.Tensor, int, int], object]) -> None:
        start, done = at % self.capacity, 0
        while done < count:
            piece = min(count - done, self.capacity - start)
            copy(self._cells[start : start + piece], done, done + piece)
            start, done = 0, done + piece

    @property
    def waiting(self) -> int:
        """Bytes that have come and are not taken."""
        return self._words[_HEAD] - self._words[_TAIL]

    @property
    def room(self) -> int:
        """Bytes that can be put."""
        return self.capacity - self.waiting

    def sleep_until_more(self, seen: int) -> None:
        """Sleeps until the sender puts more than the ``seen`` bytes that are waiting; for 20 ms at most."""
        self._futex.sleep(self._address, (self._words[_TAIL] + seen) & 0xFFFFFFFF)

    def sleep_until_room(self, seen: int) -> None:
        """Sleeps until the receiver makes more than the ``seen`` bytes of room; for 20 ms at most."""
        tail = self._words[_HEAD] - self.capacity + seen
        self._futex.sleep(self._address + 8 * _TAIL, tail & 0xFFFFFFFF)


@dataclass
class Coming:
    """A message that is expected.

    Args:
        flat: where it goes [bytes, uint8].
    """

    source: int
    tag: int
    flat: torch.Tensor
    done: bool = False


class Inbox:
    """What one other process sends."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._head = torch.empty(_FRAME, dtype=torch.int64)
        self._expected: dict[int, deque[Coming]] = {}
        self._early: dict[int, deque[torch.Tensor]] = {}  # came before they were expected
        self._coming: Coming | None = None
        self._got = 0

    def expect(self, coming: Coming) -> None:
        """Notes where a message goes, or fills it where it has come already."""
        early = self._early.get(coming.tag)
        if early:
            found = early.popleft()
            _check_size(coming, found.numel())
            coming.flat.copy_(found)
            coming.done = True
        else:
            self._expected.setdefault(coming.tag, deque()).append(coming)

    def look(self) -> int:
        """Takes what has come out of the ring; returns the bytes that are waiting for more to come."""
        while True:
            if self._coming is None:
                if self._ring.waiting < self._head.nbytes:
                    return self._ring.waiting
                self._ring.take(self._head.view(torch.uint8))
                self._begin(*self._head.tolist())
            assert self._coming is not None
            self._got += self._ring.take(self._coming.flat[self._got :])
            if self._got < self._coming.flat.numel():
                return 0
            self._end(self._coming)

    def sleep(self, seen: int) -> None:
        """Until more has come than the ``seen`` bytes."""
        self._ring.sleep_until_more(seen)

    def _begin(self, tag: int, num_bytes: int) -> None:
        expected = self._expected.get(tag)
        if expected:
            self._coming = expected.popleft()
            _check_size(self._coming, num_bytes)
        else:
            self._coming = Coming(-1, tag, torch.empty(num_bytes, dtype=torch.uint8))
        self._got = 0

    def _end(self, coming: Coming) -> None:
        self._coming = None
        coming.done = True
        if coming.source >= 0:
            return
        self._early.setdefault(coming.tag, deque()).append(coming.flat)
        if expected := self._expected.get(coming.tag):  # since it began to come
            self.expect(expected.popleft())


def frame(tag: int, num_bytes: int) -> torch.Tensor:
    """The header of a message [bytes, uint8]."""
    return torch.tensor([tag, num_bytes], dtype=torch.int64).view(torch.uint8)


def _check_size(coming: Coming, num_bytes: int) -> None:
    if coming.flat.numel() != num_bytes:
        raise RuntimeError(
            f"a message of {num_bytes} bytes came where one of {coming.flat.numel()} was expected (tag {coming.tag}): "
            "the ranks of a pipeline disagree about what passes between stages"
        )
