"""A member that stands for all: each call is answered as though every member had sent what this one did, and noted.

So one rank's part of a step runs alone, at its own pace, and what it would have said to the others, and when, is known
afterwards: :mod:`stretto.planner.replay` plays several ranks' notes together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from stretto.comm.group import SHARED_MEMORY, Group
from stretto.comm.line import Line, Sending
from stretto.comm.members import Broken, Members
from stretto.comm.shm_group import SharedMemoryGroup, Writing, _Flat, _operation
from stretto.comm.shm_memory import PAGE, SharedMemory, Unavailable
from stretto.observe import rss_bytes

BACKEND: Final = "stretto_echo"


@dataclass
class Notes:
    """What a member did, in order: each entry is ``(what, entered, left, details)``, times in seconds of a clock.

    ``begin``: a collective (details: its number, kind, members, bytes of the whole); ``wait``: until that number is
    done; ``send`` and ``receive``: a message (number, the other member, bytes, tag); ``await``: until it has come.
    """

    entries: list[tuple[str, float, float, tuple[Any, ...]]] = field(default_factory=list)
    number: int = 0

    def add(self, what: str, entered: float, *details: Any) -> None:
        """Notes what was entered then and is left now."""
        self.entries.append((what, entered, time.perf_counter(), details))

    def take(self) -> list[tuple[str, float, float, tuple[Any, ...]]]:
        """All of it, once."""
        found, self.entries = self.entries, []
        return found

    def next(self) -> int:
        """A number for a call."""
        self.number += 1
        return self.number


class _Done(Writing):
    """A collective that has been answered."""

    def __init__(self, notes: Notes, number: int, flat: _Flat | None) -> None:
        super().__init__(flat)
        self._notes, self._number = notes, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Notes that it is waited for."""
        self._notes.add("wait", time.perf_counter(), self._number)
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It is."""
        return True


class _NoSegment:
    """No memory: the place of what others would have written."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def leave(self, error: BaseException) -> None:
        """Nobody waits."""

    def check_peers(self) -> None:
        """All live."""

    def under_way(self) -> str:
        """Nothing."""
        return ""


def _carry(num_bytes: int) -> None:
    """Uses as much memory for a moment, as Gloo does: what is gathered is gathered in a copy, and what is added up and
    scattered is added up in one."""
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)


class EchoProcessGroup(SharedMemoryGroup):
    """Torch's group over members of which only this one is there."""

    def __init__(self, rank: int, members: Sequence[int], notes: Notes, apart: bool) -> None:
        super().__init__(cast(Any, _NoSegment(rank, len(members))))
        self._members, self._notes, self._apart = tuple(members), notes, apart

    def getBackendName(self) -> str:
        """For ``name()`` and torch's logs."""
        return BACKEND

    def _answer(self, kind: str, entered: float, num_bytes: int, flat: _Flat | None = None) -> dist.Work:
        if flat is not None:
            flat.copy_back()
        number = self._notes.next()
        self._notes.add("begin", entered, number, kind, self._members, num_bytes)
        return _Done(self._notes, number, flat)

    def _start(self, kind: str, what: str, steps: Any, flat: _Flat | None = None) -> dist.Work:
        entered = time.perf_counter()
        return self._answer(kind, entered, sum(one.nbytes for one in flat or ()), flat)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Each is what all give together."""
        work: dist.Work | None = None
        for tensor in tensors:
            entered = time.perf_counter()
            flat = _Flat([tensor])
            if _operation(opts) == "sum":
                flat[0].mul_(self.size())
            work = self._answer("all_reduce", entered, tensor.nbytes, flat)
        return work or self.barrier()

    def _all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor, whole: _Flat | None = None) -> dist.Work:
        entered = time.perf_counter()
        targets, source = _Flat(outputs), _Flat([own])
        for place, target in enumerate(targets):
            if place == self.rank():
                target.copy_(source[0])
            else:  # parts may be of other sizes
                count = min(target.numel(), source[0].numel())
                target.zero_()
                target[:count].copy_(source[0][:count])
        targets.copy_back()
        num_bytes = sum(one.nbytes for one in targets)
        if self._apart:
            _carry(num_bytes)
        return self._answer("all_gather", entered, num_bytes, whole)

    def _reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        entered = time.perf_counter()
        flat = _Flat([output])
        flat[0].copy_(inputs[self.rank()].reshape(-1))
        if _operation(opts) == "sum":
            flat[0].mul_(self.size())
        if self._apart:
            _carry(output.nbytes)
        return self._answer("reduce_scatter", entered, sum(one.nbytes for one in inputs), flat)


class _Echoing(Members):
    """Members of which only this one is there."""

    notes: Notes
    apart = False  # on several hosts
    answers: list[Any]  # what rank 0 said to all, in order; rank 0's own are added

    def broadcast_json(self, value: Any = None) -> Any:
        """Member 0's ``value``."""
        if self.rank:
            return self.answers.pop(0)
        self.answers.append(json.loads(json.dumps(value)))
        return self.answers[-1]

    def shared_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory of this process alone, of the kind that others could see."""
        if self.apart or self._group is None:
            raise Unavailable("the workers don't talk over shared memory")
        with SharedMemory(PAGE + num_bytes) as memory:
            offer = memory.offer()
            if why := offer["why"] or memory.take(offer):
                raise Unavailable(why)
        return torch.frombuffer(memory.mapped, dtype=torch.uint8)[PAGE:]

    def gather_parts(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        """Noted as the one call that the links were measured with, though over Gloo it is made of several at once."""
        if self._group is None or not self.over_gloo:
            return super().gather_parts(flat, sizes)
        entered, number = time.perf_counter(), self.notes.next()
        _carry(flat.nbytes)
        members = tuple(dist.get_process_group_ranks(self._group))
        self.notes.add("begin", entered, number, "all_gather", members, flat.nbytes)
        self.notes.add("wait", time.perf_counter(), number)

    @property
    def over_gloo(self) -> bool:
        """Whether calls are those that Gloo would get."""
        return self.apart


class EchoMembers(_Echoing):
    """Some of them."""

    def __init__(self, of: EchoGroup, line: tuple[int, ...], process_group: Any) -> None:
        super().__init__(line.index(of.rank), len(line), of.device, process_group, of._broken)
        self.notes, self.apart, self.answers = of.notes, of.apart, of.answers


class EchoLine(_Echoing, Line):
    """As :class:`Line`; what is received is zeros."""

    def __init__(self, of: EchoGroup, line: tuple[int, ...], process_group: Any) -> None:
        Line.__init__(self, line.index(of.rank), len(line), of.device, process_group, of._broken)
        self.notes, self.apart, self.answers, self._line = of.notes, of.apart, of.answers, line

    def open(self, num_bytes: int, pairs: Iterable[tuple[int, int]]) -> None:
        """There is nobody to have room for."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sending:
        """Notes it."""
        return self._note("send", time.perf_counter(), tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Sending:
        """Notes it."""
        entered = time.perf_counter()
        tensor.zero_()
        return self._note("receive", entered, tensor, source, tag)

    def _note(self, what: str, entered: float, tensor: torch.Tensor, other: int, tag: int) -> Sending:
        number = self.notes.next()
        self.notes.add(what, entered, number, self._line[other], tensor.nbytes, tag)
        return _Message(number)

    def wait(self, work: Sending, what: str, source: int | None = None, after: int = 0) -> None:
        """Notes that it is waited for."""
        self.notes.add("await", time.perf_counter(), cast(_Message, work).number)


@dataclass(frozen=True)
class _Message:
    number: int

    def is_completed(self) -> bool:
        """Only a wait is noted, so it is always waited for."""
        return False


class EchoGroup(_Echoing, Group):
    """A whole epoch of which only this member is there.

    Args:
        apart: the members are on several hosts, so that none of them share memory.
        answers: what rank 0 said to all, for another rank; rank 0 fills it.
    """

    def __init__(self, rank: int, size: int, apart: bool, answers: list[Any]) -> None:
        Members.__init__(self, rank, size, torch.device("cpu"), None, Broken())
        self.notes, self.apart, self.answers = Notes(), apart, answers
        self._shared, self._sockets = [], {}
        self.transport = "gloo" if apart else SHARED_MEMORY
        dist.Backend.register_backend(BACKEND, self._form_echo, extended_api=True, devices=["cpu"])
        dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=size)
        self._group = dist.group.WORLD
        self._made, self._lines = [self], []

    def _form_echo(self, options: Any, _: Any = None) -> EchoProcessGroup:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        return EchoProcessGroup(options.group_rank, members, self.notes, self.apart)

    def _among(self, lines: Sequence[tuple[int, ...]], backend: str | None = None) -> Members:
        mine, found = self._mine(lines)
        return self.alone() if found is None else EchoMembers(self, mine, found)

    def _line_of(self, lines: Sequence[tuple[int, ...]]) -> Line:
        mine, found = self._mine(lines)
        return EchoLine(self, mine, found)

    def _mine(self, lines: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], Any]:
        """The line that this member is in, and torch's group over it; None where it is alone in it."""
        made = {line: dist.new_group(list(line), backend=BACKEND) for line in lines if len(line) > 1}
        mine = next((line for line in lines if self.rank in line), (self.rank,))
        return mine, made.get(mine)


def sockets_bytes() -> int:
    """What talking over sockets takes of this process's memory, before anything is said: it forms a group of its own,
    so it is for a process that has none and is of no other use."""
    before = rss_bytes()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    return rss_bytes() - before
