"""Memory that the members of one host share, and how they wait for each other in it.

Every member has a page of words that it alone writes and two buffers. All members take the same *steps*: write the
own buffer, post the step, wait until everyone has posted it, read the others' buffers. Steps alternate between the
two buffers, and that alone keeps them apart: whoever has posted step t has read everything of step t - 1, so the
buffers of step t - 1 may be written again as soon as everyone has posted t.

*Order of memory.* A word is eight bytes, aligned, and written by one store of a memoryview. x86-64 shows stores to
others in the order they were made, and loads happen in order; copies of libc that go past the caches end in a fence.
So whoever sees the word sees the buffer. On other processors plain stores promise no such order, so :func:`available`
says no there. A futex closes the gap between looking at a word and falling asleep: the kernel compares the word again
under its own lock, and the wake that follows each store takes the same lock.

*Ends.* Who waits looks about ten times a second whether all members live.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import sys
import time
from typing import Any, Final, NoReturn

import torch
from torch._C._distributed_c10d import Store

from stretto.comm.shm_memory import PAGE, SharedMemory, Unavailable
from stretto.errors import PeerLost

BUFFER_BYTES: Final = 1 << 20  # two of them and a page for each member; larger ones fall out of the caches

_POSTED, _FAULT, _PID, _BORN = (offset // 8 for offset in (0, 64, 128, 136))  # words of a member's page
_REASON, _REASON_BYTES = 512, 512
_CALL, _CALL_BYTES = 1024, 256  # two, one for each buffer
_LOST, _DIFFERS = 1, 2

_SYS_FUTEX: Final = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NAP_NANOSECONDS: Final = 20_000_000  # a break that comes just before a nap is seen after it
_CHECK_SECONDS: Final = 0.1
_ALL_HERE_SECONDS: Final = 1.0
_SAME: Final = "every rank must make the same calls in the same order"
_SPINS: Final = 1000  # about 50 us


class Lost(PeerLost, RuntimeError):
    """A member died, left, or did not come in time, or the group was broken."""


class CallsDiffer(RuntimeError):
    """Members made different calls where all must make the same."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeping on a word of shared memory until another process wakes it; the interpreter's lock is let go."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._nap = ctypes.byref(_Timespec(0, _NAP_NANOSECONDS))
        self._all = ctypes.c_int(2**31 - 1)

    def sleep(self, address: int, seen: int) -> None:
        """Sleeps unless the 32 bits at ``address`` are no longer ``seen``; for 20 ms at most."""
        word, value = ctypes.c_void_p(address), ctypes.c_uint32(seen)
        self._call(_SYS_FUTEX, word, _FUTEX_WAIT, value, self._nap, None, 0)

    def wake(self, address: int) -> bool:
        """Wakes all who sleep at ``address``; False where the system has no futex."""
        return int(self._call(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, self._all, None, None, 0)) >= 0


def available() -> str:
    """Why this machine can't run the shared-memory backend; empty where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/stat"):
        return "shared memory needs memfd_create and /proc"
    word = ctypes.c_uint64(0)
    return "" if Futex().wake(ctypes.addressof(word)) else "shared memory needs futexes, which this system refuses"


class Segment:
    """One member's view of the shared memory of a group. One thread at a time may use it; :meth:`leave` is for any."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self.steps = 0  # posted so far
        self._timeout = timeout_seconds
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._futex = Futex()
        self._left: Exception | None = None
        self._checked = 0.0
        self._spins = _SPINS if size <= len(os.sched_getaffinity(0)) else 0
        cells = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = cells.data_ptr()
        self._buffers = [[_buffer(cells, size, owner, parity) for owner in range(size)] for parity in range(2)]
        pid = os.getpid()
        self._words[self._word(rank, _PID)] = pid
        self._words[self._word(rank, _BORN)] = _born(pid) or 0

    def mine(self) -> torch.Tensor:
        """Where to write for the next step [bytes, uint8]."""
        return self._buffers[self.steps & 1][self.rank]

    def of(self, rank: int) -> torch.Tensor:
        """What ``rank`` wrote for the step that all have posted [bytes, uint8]."""
        return self._buffers[(self.steps - 1) & 1][rank]

    def post(self, call: bytes) -> None:
        """Makes the own buffer visible; ``call`` says what is done; :meth:`wait` compares it."""
        at = self.rank * PAGE + _CALL + (self.steps & 1) * _CALL_BYTES
        self._memory[at : at + _CALL_BYTES] = call.ljust(_CALL_BYTES, b"\0")
        self.steps += 1
        self._words[self._word(self.rank, _POSTED)] = self.steps
        if self.size > 1:
            self._futex.wake(self._address + self.rank * PAGE)

    def ready(self) -> bool:
        """Whether everyone has posted the step."""
        return not self._missing()

    def wait(self, call: bytes) -> None:
        """Waits until everyone has posted the step, at most the group's time.

        Raises:
            Lost: a member died, left or did not come; the message names it and the call.
            CallsDiffer: a member posted the step with another call than ``call``.
        """
        words, deadline = self._words, 0.0
        for peer in range(self.size):
            at = self._word(peer, _POSTED)
            for _ in range(self._spins):
                if words[at] >= self.steps:
                    break
            while (seen := words[at]) < self.steps:
                now = time.monotonic()
                deadline = deadline or now + self._timeout
                self._check(call, now)
                if now > deadline:
                    missing = _ranks(self._missing())
                    raise Lost(f"rank {self.rank} waited {self._timeout:g} s in {call.decode()} for {missing}; {_SAME}")
                self._futex.sleep(self._address + peer * PAGE, seen & 0xFFFFFFFF)
            self._compare(call, peer)  # before waiting for the next: it may wait for us in another call

    def _compare(self, call: bytes, peer: int) -> None:
        if self._call_of(peer) != call.decode(errors="replace"):
            self._tell_apart(peer)

    def _tell_apart(self, peer: int) -> NoReturn:
        """A call of ``peer`` is not this member's. Where most make the same call, those lose the others to it, so that
        it is an odd one whose own traceback tells what went wrong."""
        deadline = time.monotonic() + _ALL_HERE_SECONDS
        while (missing := self._missing()) and time.monotonic() < deadline:
            time.sleep(0.001)
        found: dict[str, list[int]] = {}
        for rank in range(self.size):
            if rank not in missing:
                found.setdefault(self._call_of(rank), []).append(rank)
        mine, theirs = self._call_of(self.rank), self._call_of(peer)
        most = max(found.values(), key=len)
        if 2 * len(most) <= self.size:
            raise CallsDiffer(f"rank {self.rank} is in {mine}, but rank {peer} in {theirs}; {_SAME}")
        if self.rank in most:
            raise Lost(f"in {mine}: rank {peer} is in {theirs}; {_SAME}")
        raise CallsDiffer(f"rank {self.rank} is in {mine}, but {_ranks(most)} in {self._call_of(most[0])}; {_SAME}")

    def _call_of(self, peer: int) -> str:
        """What ``peer`` has posted for the last step."""
        at = peer * PAGE + _CALL + ((self.steps - 1) & 1) * _CALL_BYTES
        return self._memory[at : at + _CALL_BYTES].rstrip(b"\0").decode(errors="replace")

    def under_way(self) -> str:
        """The call of the step that this member has posted and others have not; empty where there is none. Any
        thread may ask."""
        if not self.steps or not self._missing():
            return ""
        return self._call_of(self.rank)

    def leave(self, why: Exception) -> None:
        """Ends every wait on this segment, here and, as this member won't come any more, at the others. Any thread."""
        if self._left is not None:
            return
        self._left = why
        at = self.rank * PAGE + _REASON
        self._memory[at : at + _REASON_BYTES] = str(why).encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        self._words[self._word(self.rank, _FAULT)] = _DIFFERS if isinstance(why, CallsDiffer) else _LOST
        for rank in range(self.size):
            self._futex.wake(self._address + rank * PAGE)

    def check_open(self) -> None:
        """Raises what :meth:`leave` was told, if it was called."""
        if self._left is not None:
            raise type(self._left)(*self._left.args)

    def check_peers(self) -> None:
        """Raises Lost where another member has died or left, whatever it has posted."""
        for peer in range(self.size):
            if self._words[self._word(peer, _FAULT)]:
                raise Lost(f"rank {peer} left: {self._reason(peer)}")
            if not self._lives(peer):
                raise Lost(f"rank {peer} died")

    def _check(self, call: bytes, now: float) -> None:
        """Raises where the step can't complete any more."""
        for peer in range(self.size):  # this member too, whose group may be broken by another thread
            if fault := self._words[self._word(peer, _FAULT)]:
                why = self._reason(peer)
                self._raise_unless_ready(
                    CallsDiffer(why) if fault == _DIFFERS else Lost(f"in {call.decode()}: rank {peer} left: {why}")
                )
        if now - self._checked > _CHECK_SECONDS:
            self._checked = now
            dead = [peer for peer in range(self.size) if not self._lives(peer)]
            if dead:
                self._raise_unless_ready(Lost(f"in {call.decode()}: {_ranks(dead)} died"))

    def _reason(self, peer: int) -> str:
        """Why a member left, in its own words."""
        at = peer * PAGE + _REASON
        return self._memory[at : at + _REASON_BYTES].rstrip(b"\0").decode(errors="replace")

    def _raise_unless_ready(self, error: Exception) -> None:
        """Who finished the step before going has done its part: all have posted, and this member may finish too."""
        if self._missing():
            raise error

    def _missing(self) -> list[int]:
        return [peer for peer in range(self.size) if self._words[self._word(peer, _POSTED)] < self.steps]

    def _lives(self, rank: int) -> bool:
        born = _born(self._words[self._word(rank, _PID)])
        return born is not None and born == self._words[self._word(rank, _BORN)]

    def _word(self, rank: int, offset: int) -> int:
        return rank * (PAGE // 8) + offset


def form_segment(store: Store, rank: int, size: int, timeout_seconds: float) -> Segment:
    """The memory of a new group, whose members meet in ``store``. Every member must call it.

    Raises:
        Unavailable: on every member alike, where one of them can't; it says which and why.
        Lost: a member did not come in time.
    """
    segment = None
    with SharedMemory(_total_bytes(size)) as memory:
        answer: dict[str, Any] = {"why": available()}
        if not answer["why"] and rank == 0:
            answer = memory.offer()
        offer = answer if rank == 0 else json.loads(_read(store, 0, rank, timeout_seconds))
        if not answer["why"] and not offer["why"]:
            answer["why"] = memory.take(offer)
            if not answer["why"]:  # before the others hear of it: from then on they look whether this member lives
                segment = Segment(memory.mapped, rank, size, timeout_seconds)
        store.set(f"member-{rank}", json.dumps(answer))
        answers = [json.loads(_read(store, peer, rank, timeout_seconds)) for peer in range(size)]
    for peer, found in enumerate(answers):
        if found["why"]:
            raise Unavailable(f"rank {peer}: {found['why']}")
    assert segment is not None
    return segment


def _total_bytes(size: int) -> int:
    return size * (PAGE + 2 * BUFFER_BYTES)


def _buffer(cells: torch.Tensor, size: int, owner: int, parity: int) -> torch.Tensor:
    start = size * PAGE + (2 * owner + parity) * BUFFER_BYTES
    return cells[start : start + BUFFER_BYTES]


def _read(store: Store, peer: int, rank: int, timeout_seconds: float) -> bytes:
    """What ``peer`` says of itself. Looks often at first: a store's own wait() sleeps for 10 ms at a time."""
    deadline, nap = time.monotonic() + timeout_seconds, 0.0002
    while not store.check([f"member-{peer}"]):
        if time.monotonic() > deadline:
            raise Lost(f"rank {rank} waited {timeout_seconds:g} s for rank {peer} to form the group")
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return bytes(store.get(f"member-{peer}"))


def _born(pid: int) -> int | None:
    """When a process began, in ticks since the machine's start; None where it has ended, be it unreaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
