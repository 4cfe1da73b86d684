"""The host process of one job: prepares once, then forks the workers, which share what was prepared."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from stretto.comm.framed import Channel, Message, channel_of
from stretto.launch.failures import describe
from stretto.launch.job import Job, resolve
from stretto.launch.process import Child, flush_output, fork, resident_bytes, share_heap
from stretto.launch.worker import run_worker, set_threads


def run_host(job: Job, directory: str, channel: Channel) -> int:
    """The body of a host's process, just forked from the server. Returns the exit code."""
    imports_rss_bytes = resident_bytes()
    try:
        os.chdir(directory)
        sys.path[:0] = job.python_path
        set_threads(1)  # a pool of threads would not survive the fork of the workers
        prepared = _prepare(job, channel)
        resolve(job.entry)  # imported once, here, for all workers
    except BaseException as error:
        word = describe(error, "before there were workers")
        channel.send(word)
        return int(word["exit_code"])
    share_heap()
    _Host(job, channel, prepared, imports_rss_bytes).serve()
    return 0


def _prepare(job: Job, channel: Channel) -> Any:
    if job.prepare is None:
        return None

    def report(event: dict[str, Any]) -> None:
        channel.send({"kind": "event", "event": event})

    # Standard output is the launcher's, which may owe its reader nothing but JSON: neither what Python prints nor
    # what a library or a program of the task's writes may come there.
    with _stdout_to_stderr():
        return resolve(job.prepare)(job.payload, report)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    flush_output()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush_output()
        os.dup2(kept, 1)
        os.close(kept)


class _Host:
    """Starts and signals workers as the launcher says, and tells it of their ends."""

    def __init__(self, job: Job, channel: Channel, prepared: Any, imports_rss_bytes: int) -> None:
        self._job = job
        self._channel = channel
        self._prepared = prepared
        self._imports_rss_bytes = imports_rss_bytes
        self._workers: dict[str, Child] = {}

    def serve(self) -> None:
        """Works until the launcher has gone; the workers, whose parent this is, end with it."""
        self._channel.send({"kind": "prepared"})
        while not self._channel.at_end:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            for worker in self._workers.values():
                poll.register(worker, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._channel.fileno() in ready:
                for message in self._channel.receive_ready():
                    self._obey(message)
            for member, worker in list(self._workers.items()):
                if worker.fileno() in ready:
                    self._ended(member, self._workers.pop(member).reap())

    def _obey(self, message: Message) -> None:
        member = message["member"]
        if message["kind"] == "spawn":
            self._spawn(member, self._channel.take_fd())
        elif member in self._workers:
            self._workers[member].signal(message["signal"])

    def _spawn(self, member: str, fd: int) -> None:
        def body() -> int:
            self._channel.close()
            for sibling in self._workers.values():
                os.close(sibling.pidfd)
            return run_worker(self._job, member, channel_of(fd), self._prepared, self._imports_rss_bytes)

        try:
            self._workers[member] = fork(body)
        except OSError as error:
            self._ended(member, 1, f"worker {member} cannot be started: {error.strerror}")
        finally:
            os.close(fd)

    def _ended(self, member: str, status: int, refusal: str = "") -> None:
        self._channel.send(
            {
                "kind": "ended",
                "member": member,
                "status": status,
                "time": time.monotonic(),
                "refusal": refusal,
            }
        )
