"""Loaders: processes of one rank that fetch and collate ahead of it.

A loader is forked, so it has the datasets as they are at that moment and nothing has to be sent; it never touches an
accelerator. It answers one request after another over a socket of its own. It is deaf to Ctrl-C and SIGTERM, which
reach whole process groups, for its rank still needs it on the way to a safe point; it ends with its rank instead,
however that ends.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from stretto.data.fetch import fetch
from stretto.data.parcel import MAX_FILES, close, pack, unpack
from stretto.errors import LoaderError, UserError

Request = tuple[str, tuple[int, ...], int | str]  # split, ids, epoch
_DEAF: Final = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG: Final = 1


class SampleError(Exception):
    """``__getitem__`` or ``collate`` raised in a loader; the text ends with the traceback there, whole."""


@dataclass
class _Loader:
    """One process, as its rank sees it: the requests it has yet to answer, in order, and the answers not yet taken."""

    pid: int
    socket: socket.socket
    waiting: list[int] = field(default_factory=list)


class Loaders:
    """The loaders of one rank. To be made in the main thread of a process: loaders end with the thread."""

    def __init__(
        self, datasets: Mapping[str, Dataset[Any]], collate: Callable[[list[Any]], Any], seed: int, count: int
    ) -> None:
        """Forks ``count`` loaders. Raises LoaderError where the machine has no room for them."""
        self._requests: dict[int, Request] = {}
        self._answers: dict[int, list[int]] = {}
        self._next = 0
        self._loaders: list[_Loader] = []
        work = _Work(datasets, collate, seed)
        try:
            for _ in range(count):
                self._fork(work, count)
        except LoaderError:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._loaders)

    def submit(self, request: Request) -> int:
        """Hands ``request`` to the loader with the least to do. Returns the ticket to :meth:`take` the answer with."""
        loader = min(self._loaders, key=lambda each: len(each.waiting))
        ticket, self._next = self._next, self._next + 1
        self._requests[ticket] = request
        loader.waiting.append(ticket)
        files = pack((ticket, request))
        try:
            _send(loader.socket, files)
        except (BrokenPipeError, ConnectionResetError):
            self._tell_of_death(loader)
        finally:
            close(files)
        return ticket

    def take(self, ticket: int) -> Any:
        """The collated samples of a ticket, waited for where they are not ready; each can be taken once.

        Raises:
            SampleError: the program failed over there.
            UserError: as it was raised over there.
            LoaderError: a loader has died.
        """
        while ticket not in self._answers:
            self._receive()
        del self._requests[ticket]
        files = self._answers.pop(ticket)
        try:
            kind, value = unpack(files)
        finally:
            close(files)
        if kind == "user":
            raise value
        if kind == "error":
            raise SampleError(value)
        return value

    def forget(self, ticket: int) -> None:
        """The answer is not wanted any more."""
        self._requests.pop(ticket, None)
        close(self._answers.pop(ticket, []))

    def close(self) -> None:
        """Ends all loaders at once; may be called again."""
        for files in self._answers.values():
            close(files)
        self._answers.clear()
        while self._loaders:
            loader = self._loaders.pop()
            loader.socket.close()
            os.kill(loader.pid, signal.SIGKILL)  # it has nothing to lose, and isn't reaped, so the number is its own
            _reap(loader.pid)

    def _receive(self) -> None:
        """Waits for news of any loader: so that the death of one is known at once, and none holds files under way."""
        poll = select.poll()
        for loader in self._loaders:
            poll.register(loader.socket, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        for loader in self._loaders:
            if loader.socket.fileno() in ready:
                files = _receive(loader.socket)
                if not files:
                    self._tell_of_death(loader)
                ticket = loader.waiting.pop(0)
                if ticket in self._requests:
                    self._answers[ticket] = files
                else:
                    close(files)

    def _fork(self, work: _Work, count: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):  # or both processes would print what is still buffered
            with suppress(Exception):
                stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads; the child starts none
                pid = os.fork()
        except OSError as error:
            raise LoaderError(f"loader {len(self) + 1} of {count} can't be started: {error.strerror}") from error
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid == 0:
            try:
                for number in _DEAF:
                    signal.signal(number, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                _end_with(parent)
                for descriptor in (ours, *(loader.socket for loader in self._loaders)):
                    descriptor.close()
                work.serve(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):
                        stream.flush()
                os._exit(1)  # in an orderly end it is killed, or its rank has gone
        theirs.close()
        self._loaders.append(_Loader(pid, ours))

    def _tell_of_death(self, loader: _Loader) -> None:
        number, count = self._loaders.index(loader) + 1, len(self)
        doing = self._requests.get(loader.waiting[0]) if loader.waiting else None
        self._loaders.remove(loader)
        loader.socket.close()
        raise LoaderError(_obituary(f"loader {number} of {count} (process {loader.pid})", _reap(loader.pid), doing))


@dataclass(frozen=True)
class _Work:
    """What a loader does."""

    datasets: Mapping[str, Dataset[Any]]
    collate: Callable[[list[Any]], Any]
    seed: int

    def serve(self, channel: socket.socket) -> None:
        """Answers requests until the rank has closed the socket."""
        gc.freeze()  # what is inherited shall not be copied page by page for being looked at
        torch.set_num_threads(1)
        while files := _receive(channel):
            _, request = unpack(files)
            close(files)
            answer = self._answer(request)
            try:
                _send(channel, answer)
            except BrokenPipeError:
                return
            close(answer)

    def _answer(self, request: Request) -> list[int]:
        split, ids, epoch = request
        try:
            samples = fetch(self.datasets[split], ids, self.collate, self.seed, epoch)
        except UserError as error:
            return pack(("user", type(error)(str(error))))
        except Exception as error:
            return pack(("error", _told(error)))
        try:
            return pack(("samples", samples))
        except OSError as error:
            return pack(("user", LoaderError(f"a loader finds no room for its samples: {error}; {_advice()}")))
        except Exception as error:
            text = (
                f"loaders: what collate() returned can't be sent to another process ({type(error).__name__}: {error}); "
                "return only what pickle can take, with classes at the top of their module, or use loaders=0"
            )
            return pack(("user", LoaderError(text)))


def _told(error: Exception) -> str:
    """The traceback from the program's first own frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    text = traceback.format_exception(error.with_traceback(trace or error.__traceback__))
    return "in a loader:\n\n" + "".join(text).rstrip()


def _obituary(who: str, status: int, doing: Request | None) -> str:
    """One line on a loader's death: by what, over what, and what to do."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown to Python"
        text = f"{who} was killed by signal {-status} ({name})"
    else:
        text = f"{who} ended with exit code {status}; the log has more"
    if doing is not None:
        split, ids, epoch = doing
        some = ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")
        text += f" over {len(ids)} sample(s) of data()[{split!r}] ({some}), epoch {epoch}"
    if -status == signal.SIGKILL:
        text += "; the kernel's out-of-memory killer is a possible cause: use fewer loaders"
    elif -status == signal.SIGBUS:
        text += f"; shared memory or a mapped file ran out: {_advice()}"
    return text


def _advice() -> str:
    try:
        found = os.statvfs("/dev/shm")
        mib = found.f_frsize / (1 << 20)
        room = f"/dev/shm has {found.f_bavail * mib:.0f} MiB free of {found.f_blocks * mib:.0f}"
    except OSError:
        room = "there is no /dev/shm"
    return f"{room}; enlarge it (docker run --shm-size=8g) or the memory limit, or use fewer loaders"


def _send(channel: socket.socket, files: Sequence[int]) -> None:
    while True:
        try:
            socket.send_fds(channel, [b"."], files)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
        time.sleep(0.005)  # the user has as many under way as may be open; the ranks take them off as they wait


def _receive(channel: socket.socket) -> list[int]:
    """The descriptors of the next parcel; none where the other side has gone."""
    try:
        _, files, flags, _ = socket.recv_fds(channel, 1, MAX_FILES)
    except ConnectionResetError:
        return []
    if flags & socket.MSG_CTRUNC:
        close(files)
        raise LoaderError("loaders: this process has no room for more open files; raise `ulimit -n`")
    return files


def _end_with(parent: int) -> None:
    """Ends this process with SIGKILL when its rank ends, even while it is busy or stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reap(pid: int) -> int:
    with suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 1
