"""Memory that processes of one host share, without a name.

It lies in no file system (memfd), so nothing is left behind by a kill, and a full /dev/shm doesn't matter. It is
allotted at once, so there is no SIGBUS later. The maker offers its descriptor; the others open it through /proc.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from types import TracebackType
from typing import Any, Final

PAGE: Final = 4096  # the first one is a header of the maker's
TOKEN_OFFSET: Final = 144  # bytes; the segment keeps words of its own around it


class Unavailable(RuntimeError):
    """The members can't share memory; raised on all of them alike, so that all may choose another way."""


class SharedMemory:
    """``num_bytes`` in all, header included, all zero at first. One process offers it, and each one takes it.

    The descriptor lives until the ``with`` block ends, the mapping as long as someone holds ``mapped``.
    """

    mapped: mmap.mmap

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._fd = -1

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def offer(self) -> dict[str, Any]:
        """Makes it, in the one process that does. Plain JSON for :meth:`take`; ``why`` it isn't there, where it can't
        be had."""
        try:
            self._fd = os.memfd_create("stretto", os.MFD_CLOEXEC)
            os.posix_fallocate(self._fd, 0, self._num_bytes)
            token = secrets.token_hex(8)
            os.pwrite(self._fd, bytes.fromhex(token), TOKEN_OFFSET)
        except OSError as error:
            return {"why": f"no memory to share ({self._num_bytes >> 20} MiB): {error}"}
        return {"why": "", "pid": os.getpid(), "fd": self._fd, "token": token}

    def take(self, offer: dict[str, Any]) -> str:
        """Maps what was offered, in every process; why not, where that fails."""
        try:
            self.mapped = self._map(offer)
        except OSError as error:
            return f"can't map the memory of process {offer['pid']}: {error}"
        return ""

    def _map(self, offer: dict[str, Any]) -> mmap.mmap:
        fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != self._num_bytes:
                raise OSError(errno.ESTALE, "another process has its number")
            memory = mmap.mmap(fd, self._num_bytes)
        finally:
            os.close(fd)
        if memory[TOKEN_OFFSET : TOKEN_OFFSET + 8] != bytes.fromhex(offer["token"]):
            raise OSError(errno.ESTALE, "another process has its number")
        return memory
