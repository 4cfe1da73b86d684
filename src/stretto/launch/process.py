"""Forked processes that never outlive what they belong to.

Death is passed down by the kernel, so that it also reaches a process that is stopped, busy in a native call, or
holds the interpreter's lock:

- *lifeline*: a pipe whose only writing end the launcher holds. When the launcher ends, however it ends, the kernel
  sends SIGKILL to the whole process group of each reader (``fcntl(2)``: ``F_SETOWN``, ``F_SETSIG``, ``O_ASYNC``): the
  fork server's group, and each job's group with its workers, their loaders and any program they started.
- *parent death signal*: a process gets SIGKILL when its own parent ends (``prctl(2)``: ``PR_SET_PDEATHSIG``).

Only own processes are ever signalled: children that are known from their fork and not yet reaped, whose ids the
kernel therefore cannot have given to anyone else.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

from stretto.errors import ProbeFailed

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def end_group_with(lifeline: int) -> int:
    """Ends this process's whole group when the writing end of the pipe ``lifeline`` closes.

    Returns the descriptor that must stay open for it. It is opened anew, because the owner of a lifeline belongs to
    the open file, which would otherwise be shared with other groups.
    """
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:  # it closed before we were listening
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return own


def die_with(parent: int) -> None:
    """Ends this process with SIGKILL when the thread of ``parent`` that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def pass_death_to_forks() -> None:
    """From now on each process that this one forks from its main thread (a data loader's worker) ends with it.

    Forks from other threads are left to the lifeline: their death signal would come when the *thread* ends.
    """
    parent, from_main = 0, False

    def before() -> None:
        nonlocal parent, from_main
        parent, from_main = os.getpid(), threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if from_main:
            die_with(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


@dataclass(frozen=True)
class Child:
    """A forked process of ours, from its fork until :meth:`reap`."""

    pid: int
    pidfd: int
    own_group: bool

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self.pidfd

    def signal(self, number: int) -> None:
        """Sends it a signal; nothing happens where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self) -> None:
        """SIGKILL for it and all that it started. While it isn't reaped, the group's number is its own."""
        self.signal(signal.SIGKILL)
        if self.own_group:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for its end, ends what is left of its group, and returns its status, negative for a signal."""
        select.select([self.pidfd], [], [])
        if self.own_group:
            self.kill_group()
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


def fork(body: Callable[[], int], *, own_group: bool = False) -> Child:
    """Runs ``body`` in a child that ends with this process; what it returns is the exit code.

    Raises OSError where the machine has no room for another process.
    """
    flush_output()  # or both processes would print what is still buffered
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with(parent)
            if own_group:
                os.setpgid(0, 0)
            code = body()
        except BaseException:
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(code)
    if own_group:
        with suppress(OSError):  # done on both sides, so that neither can come too late
            os.setpgid(pid, pid)
    return Child(pid, os.pidfd_open(pid), own_group)


def aside(body: Callable[[], T]) -> T:
    """What ``body`` returns, which must be JSON, from a forked process, so that none of its memory stays here.

    A new thread runs it there: those of OpenMP belong to the thread that started them, and don't survive a fork. Where
    ``body`` raises, it is run once more here, where that is met whole.

    Raises:
        ProbeFailed: the process was killed, such as for want of memory, or could not be made.
    """
    reading, writing = os.pipe()

    def run() -> int:
        os.close(reading)
        faulthandler.disable()
        found: list[bytes] = []

        def work() -> None:
            with suppress(BaseException):
                found.append(json.dumps(body()).encode())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        os.write(writing, b"".join(found))
        return 0

    try:
        child = fork(run)
    except OSError as error:
        os.close(reading)
        raise ProbeFailed(f"the machine has no room for a process: {error.strerror}") from error
    finally:
        os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    if (status := child.reap()) < 0:
        raise ProbeFailed(f"its process was ended by {signal.Signals(-status).name}")
    return cast(T, json.loads(text)) if text else body()


def share_heap() -> None:
    """Takes all Python objects of now out of garbage collection, which in a child would copy the pages it shares."""
    gc.collect()
    gc.freeze()


def flush_output() -> None:
    """Writes out what Python holds back of standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
