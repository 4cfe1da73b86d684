"""The process group of one membership epoch, and how it is broken from outside.

Torch's groups outlive their usefulness: a peer that is stopped, or one that shares no collective with the dead, keeps
a member inside a call that no timeout of the group ends. So this group knows the sockets it opened; shutting them
down from another thread ends every call on it within milliseconds (measured), and the next epoch builds a new group.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

# Its functions take as a default whatever group is torch's default when they are imported, so after one has been formed
# they would hold that to the end of the process.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from stretto.comm.line import Line
from stretto.comm.members import Broken, Members
from stretto.comm.shm_group import BACKEND, SharedMemoryGroup, form_shared_memory_group
from stretto.comm.shm_memory import Unavailable
from stretto.errors import LaunchError, PeerLost
from stretto.mesh import Mesh

SHARED_MEMORY: Final = "shared memory"  # a group's ``transport``


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of an epoch meet.

    Args:
        store: ``file:///path`` (one host; the folder is private to the user) or ``tcp://host:port``.
        epoch: number of the membership epoch; prefixes every key, so that no epoch meets another's leftovers.
        rank: this member's rank in the epoch.
        world_size: members of the epoch.
        timeout_seconds: longest wait inside one collective.
    """

    store: str
    epoch: int
    rank: int
    world_size: int
    timeout_seconds: float = 1800.0


class Group(Members):
    """All members of one epoch. Every method that communicates must be called by every member, in the same order.

    The group is torch's default group while it lives, because FSDP2 and DTensor find groups only through torch's
    world; :meth:`close` leaves nothing behind, so the next epoch can build its own in the same process.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device | None = None) -> None:
        """Forms the group. Raises PeerLost where the others don't come in time."""
        super().__init__(rendezvous.rank, rendezvous.world_size, device or torch.device("cpu"), None, Broken())
        self._shared: list[SharedMemoryGroup] = []  # this one and subgroups of it
        self._store = _open_store(rendezvous)
        before = _socket_inodes()
        one_host = rendezvous.store.startswith("file://") or self.size == 1
        self.transport = self._form(rendezvous, one_host and self.device.type == "cpu")
        self._group = dist.group.WORLD
        self._made: list[Members] = [self]  # those whose calls are counted
        self._lines: list[Line] = []
        self._sockets = _opened_since(before)

    def _form(self, rendezvous: Rendezvous, one_host: bool) -> str:
        """Forms torch's default group; returns over what it talks, and where that is the slower way, why."""
        why = ""
        if one_host:
            dist.Backend.register_backend(BACKEND, self._form_shared, extended_api=True, devices=["cpu"])
            try:
                self._init(rendezvous, BACKEND)
                return SHARED_MEMORY
            except Unavailable as error:  # on all members alike
                why = f" ({error})"
        self._init(rendezvous, "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        return ("nccl" if self.device.type == "cuda" else "gloo") + why

    def _init(self, rendezvous: Rendezvous, backend: str) -> None:
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore(f"epoch-{rendezvous.epoch}", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
            )
        except Unavailable:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise PeerLost(f"the group of epoch {rendezvous.epoch} was not formed: {error}") from error

    def _form_shared(self, *arguments: Any) -> SharedMemoryGroup:
        self._shared.append(form_shared_memory_group(*arguments))
        return self._shared[-1]

    def along(self, mesh: Mesh, *axes: str) -> Members:
        """The members whose places on ``mesh`` differ from this one's on ``axes`` alone. Every member must call it."""
        if math.prod(mesh.degree(axis) for axis in axes) == self.size:
            return self
        return self._among(mesh.lines(*axes))

    def holders(self, mesh: Mesh, line: Sequence[str], places: Sequence[int], *axes: str) -> Members:
        """The members whose places differ from this one's on ``axes`` and on those of the line, where they are among
        ``places`` of that. Every member must call it; one that is not among them itself gets itself alone."""
        held = {members[place] for members in mesh.lines(*line) for place in places}
        lines = (tuple(rank for rank in members if rank in held) for members in mesh.lines(*line, *axes))
        return self._among(tuple(lines))

    def line(self, mesh: Mesh, *axes: str) -> Line:
        """As :meth:`along`, for messages from one member to another. Every member must call it."""
        return self._line_of(mesh.lines(*axes))

    def _line_of(self, lines: Sequence[tuple[int, ...]]) -> Line:
        plain = self._among(lines, "gloo" if self.device.type == "cpu" else None)
        shared = self._among(lines) if self.transport == SHARED_MEMORY and plain.size > 1 else None
        self._lines.append(Line(plain.rank, plain.size, self.device, plain._group, self._broken, shared))
        return self._lines[-1]

    def _among(self, lines: Sequence[tuple[int, ...]], backend: str | None = None) -> Members:
        """Those of the line that this member is in; each member is in one at most."""
        mine = next((line for line in lines if self.rank in line), (self.rank,))
        if len(mine) == 1 and all(len(line) == 1 for line in lines):
            return self.alone()
        before = _socket_inodes()
        with self.guard():
            found = {line: dist.new_group(list(line), backend=backend) for line in lines if len(line) > 1}
        self._sockets |= _opened_since(before)
        if mine not in found:
            return self.alone()
        self._made.append(Members(mine.index(self.rank), len(mine), self.device, found[mine], self._broken))
        return self._made[-1]

    def break_(self) -> None:
        """Ends every call on this group, now and later, with PeerLost. Any thread may call it, at any time."""
        self._broken.so = True
        for group in self._shared:
            group.break_()
        for fd, inode in self._sockets.items():
            if _inode(fd) == inode:
                _shutdown(fd)

    def under_way(self) -> tuple[str, int]:
        """The call that this member has begun and others have not, where that is known, and how many it has begun on
        the groups of this epoch. Any thread may ask, at any time."""
        if self._shared:
            found = [group.under_way() for group in self._shared]
            return next((call for call, _ in found if call), ""), sum(number for _, number in found)
        groups: list[Any] = [members.process_group for members in self._made]  # torch's types lack the call
        numbers = [group._get_sequence_number_for_group() for group in groups]
        return "", sum(numbers)

    def awaited(self) -> dict[str, Any]:
        """The message that this member waits for from another, if any, and how much it has behind it; JSON. Any thread
        may ask, at any time."""
        awaited = self._broken.awaited
        return {"passed": self._broken.passed, **({} if awaited is None else asdict(awaited))}

    def close(self) -> None:
        """Destroys the group; afterwards another one may be formed in this process. Every member calls it alone.

        Gloo's threads end with the last who holds torch's group. One that lives until the interpreter ends may free a
        tensor then, and the process aborts: so whoever still holds one of these members holds nothing of torch's.
        """
        if dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        ending, self._made = [*self._made, *self._lines], []
        self._sockets, self._shared, self._lines = {}, [], []
        for members in ending:
            members.let_go()


def _open_store(rendezvous: Rendezvous) -> Store:
    kind, _, place = rendezvous.store.partition("://")
    if rendezvous.world_size == 1:  # whoever started it names a store perhaps, which nobody hosts
        return HashStore()
    if kind == "file":
        # A file for each epoch: a store removes its file when the last holder lets go, be it late.
        return FileStore(f"{place}-{rendezvous.epoch}", rendezvous.world_size)
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
    raise LaunchError(f"store {rendezvous.store!r}: expected file:///path or tcp://host:port")


def _inode(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _socket_inodes() -> dict[int, str]:
    """Open sockets of this process by descriptor. Empty where there is no /proc: then only timeouts end a call."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    found = {int(name): _inode(int(name)) for name in names}
    return {fd: inode for fd, inode in found.items() if inode.startswith("socket:")}


def _opened_since(before: dict[int, str]) -> dict[int, str]:
    """The connected sockets that were not there before."""
    after = _socket_inodes()
    return {fd: inode for fd, inode in after.items() if before.get(fd) != inode and _connected(fd)}


def _with_socket(fd: int, action: Any) -> bool:
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    try:
        action(duplicate)
        return True
    except OSError:
        return False
    finally:
        duplicate.close()


def _connected(fd: int) -> bool:
    # Only connected sockets: shutting a listener down makes Gloo's accept() abort the whole process (measured).
    return _with_socket(fd, lambda opened: opened.getpeername())


def _shutdown(fd: int) -> bool:
    return _with_socket(fd, lambda opened: opened.shutdown(socket.SHUT_RDWR))
