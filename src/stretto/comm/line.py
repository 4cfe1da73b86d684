"""Members that send messages to one another: over shared memory on one host, else by torch's own calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist

from stretto.comm.members import Awaited, Broken, Members
from stretto.comm.rings import HEADER_BYTES, SPINS, Coming, Inbox, Ring, frame
from stretto.comm.shm_memory import Unavailable
from stretto.comm.shm_segment import Futex, Lost

LEAST_BYTES: Final = 2**18  # of a ring
_LOOK_SECONDS: Final = 0.1  # between looks whether the others live


class Sending(Protocol):
    """A message on its way."""

    def is_completed(self) -> bool:
        """Whether it has gone, or come."""


class Line(Members):
    """Some members, in order; made by :meth:`Group.line`.

    Args:
        shared: the same members over shared memory, where they have that.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        broken: Broken,
        shared: Members | None = None,
    ) -> None:
        super().__init__(rank, size, device, process_group, broken)
        self._shared = shared
        self._rings: dict[int, Ring] = {}  # to each other member
        self._inboxes: dict[int, Inbox] = {}

    def open(self, num_bytes: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Makes room for messages in shared memory, where there is some. Every member must call it, with the same.

        Args:
            num_bytes: that may be on their way from one member to another at once.
            pairs: who sends to whom.
        """
        wanted = sorted(set(pairs))
        if self._shared is None or self.size == 1 or not wanted:
            return
        each = HEADER_BYTES + -(-max(num_bytes, LEAST_BYTES) // 64) * 64
        try:
            memory = self._shared.shared_memory(each * len(wanted))
        except Unavailable:  # on all members alike; messages go the slower way
            return
        futex = Futex()
        for place, (source, to) in enumerate(wanted):
            cells = memory[place * each : (place + 1) * each]
            if source == self.rank:
                self._rings[to] = Ring(cells, futex)
            elif to == self.rank:
                self._inboxes[source] = Inbox(Ring(cells, futex))

    def passed(self, number: int) -> None:
        """Notes how many pieces of work this member has behind it, for whoever asks why another waits."""
        self._broken.passed = number

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sending:
        """Sends a contiguous ``tensor`` to one member, who must receive it; it must stay as it is until it has gone.

        Args:
            tag: what it is, at least 0; but over NCCL it only meets a receive of the same tag.
        """
        if (ring := self._rings.get(to)) is not None:
            self._put(ring, frame(tag, tensor.nbytes))
            self._put(ring, _flat(tensor))
            return _GONE
        tag = tag if self.device.type == "cpu" else 0  # NCCL has none: there the order alone tells
        with self.guard():
            return cast(Sending, dist.isend(tensor, group_dst=to, group=self.process_group, tag=tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Sending:
        """Begins to receive into a contiguous ``tensor`` what one member sends; messages of one sender, and of one tag,
        come in the order in which they were sent."""
        if (inbox := self._inboxes.get(source)) is not None:
            coming = Coming(source, tag, _flat(tensor))
            inbox.expect(coming)
            return _Expected(self, coming)
        tag = tag if self.device.type == "cpu" else 0
        with self.guard():
            return cast(Sending, dist.irecv(tensor, group_src=source, group=self.process_group, tag=tag))

    def wait(self, work: Sending, what: str, source: int | None = None, after: int = 0) -> None:
        """Returns when a message has gone or come.

        Args:
            what: in words, for whoever asks what this member waits in.
            source: who sends it, ``after`` so many pieces of work; None for one that goes out.
        """
        if work.is_completed():
            return
        sender = None if source is None else dist.get_global_rank(self.process_group, source)
        self._broken.awaited = Awaited(what, sender, after)
        with self.guard():
            if isinstance(work, _Expected):
                self._wait_for(work.coming)
            else:
                cast(Any, work).wait()
        self._broken.awaited = None

    # ---- over shared memory

    def look(self, source: int) -> int:
        """Takes what has come from one member; returns the bytes that are waiting for more."""
        return self._inboxes[source].look()

    def _wait_for(self, coming: Coming) -> None:
        inbox, looked = self._inboxes[coming.source], time.monotonic()
        for _ in range(SPINS):
            inbox.look()
            if coming.done:
                return
        while True:
            seen = inbox.look()
            if coming.done:
                return
            inbox.sleep(seen)
            looked = self._check(looked)

    def _put(self, ring: Ring, data: torch.Tensor) -> None:
        """All of it. While the ring is full, what others send is taken, so that no two wait for each other's room."""
        done, looked = ring.put(data), time.monotonic()
        while done < data.numel():
            for inbox in self._inboxes.values():
                inbox.look()
            done += ring.put(data[done:])
            if done < data.numel() and not (room := ring.room):
                ring.sleep_until_room(room)
                looked = self._check(looked)

    def _check(self, looked: float) -> float:
        """Raises where the others can't be waited for any more; looks at them once in a while."""
        if self._broken.so:
            raise Lost(f"rank {self.rank}: the group was broken")
        now = time.monotonic()
        if now - looked < _LOOK_SECONDS:
            return looked
        assert self._shared is not None
        self._shared.check_peers()
        return now


@dataclass(frozen=True)
class _Expected:
    line: Line
    coming: Coming

    def is_completed(self) -> bool:
        """Whether it has come; takes what has."""
        if not self.coming.done:
            self.line.look(self.coming.source)
        return self.coming.done


@dataclass(frozen=True)
class _Gone:
    def is_completed(self) -> bool:
        """It has been copied."""
        return True


_GONE: Final = _Gone()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
