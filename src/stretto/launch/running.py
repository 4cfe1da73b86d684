"""One running job, seen from the launcher: waits for news, asks the coordinator, does what it says."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from stretto.comm.framed import Channel, Message, channel_pair
from stretto.elastic.coordinator import (
    Announce,
    AskToStop,
    AtSafePoint,
    Break,
    Command,
    Coordinator,
    Ended,
    Event,
    Finish,
    GraceOver,
    Hung,
    Joined,
    Kill,
    KillRequested,
    Spawn,
    StopRequested,
    Terminate,
    Wait,
)
from stretto.elastic.failure import Failure
from stretto.errors import LaunchError
from stretto.launch.failures import judge
from stretto.launch.interrupts import Interrupts
from stretto.launch.job import Job, JobResult
from stretto.launch.tail import Tail
from stretto.watch import Record, Standing, Subject, Watcher, judge_sizes, state_of_process

_CLEAR_SECONDS = 2.0
_TAIL_SECONDS = 0.1
_LOG_BYTES = 1 << 16
_SIZES_DIFFER = b"gloo::EnforceNotMet"


class ServerSide(Protocol):
    """What a job needs of its fork server."""

    channel: Channel

    def close(self) -> int:
        """Ends the server and all that came from it; returns its exit status."""
        ...


class _Worker:
    """What the launcher knows of one member."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.channel = channel
        self.pid = 0
        self.record = Record()
        self.last_word: Message | None = None

    def joined(self, pid: int, record: int) -> None:
        """It runs, and keeps its record where the descriptor leads."""
        self.pid, self.record = pid, Record.of(record)
        os.close(record)

    def seen(self) -> Subject:
        """What can be seen of it now."""
        return Subject("ended" if self.channel.at_end else state_of_process(self.pid), self.record)


class RunningJob:
    """Call :meth:`run`, then :meth:`clear_away`."""

    def __init__(
        self,
        job: Job,
        coordinator: Coordinator,
        server: ServerSide,
        interrupts: Interrupts,
        on_event: Callable[[str, dict[str, Any]], None] | None,
        on_output: Callable[[str], None] | None,
    ) -> None:
        self._job = job
        self._coordinator = coordinator
        self._server = server
        self._interrupts = interrupts
        self._on_event = on_event or (lambda member, event: None)
        self._on_output = on_output or _print
        self._host: Channel | None = None
        self._host_runs = False
        self._workers: dict[str, _Worker] = {}
        self._results: dict[str, dict[str, Any] | None] = {}
        self._tail: Tail | None = None
        self._deadline: float | None = None
        self._interrupted = not job.safe_points
        self._finish: Finish | None = None
        self._watcher = Watcher(job.hang_after)

    def run(self) -> JobResult:
        """From the request for a host to the end of the job."""
        self._host, theirs = channel_pair()
        message = {"kind": "job", "job": self._job.to_message(), "directory": str(Path.cwd())}
        with theirs:
            try:
                self._server.channel.send(message, [theirs.fileno()])
            except ConnectionError:
                self._hear_server()
        self._host_runs = True
        while self._finish is None:
            self._hear(self._wait())
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                self._feed(GraceOver())
            if self._watcher.due is not None and time.monotonic() >= self._watcher.due:
                self._look_for_a_hang()
        self._close_logs()
        return JobResult(self._finish.exit_code, self._results, self._finish.failure)

    def clear_away(self) -> bool:
        """Ends what is left of the job. Returns whether the server confirmed it in time."""
        for channel in (self._host, *(worker.channel for worker in self._workers.values())):
            if channel is not None:
                channel.close()
        deadline = time.monotonic() + _CLEAR_SECONDS
        server = self._server.channel
        if self._host_runs:
            with suppress(ConnectionError):
                server.send({"kind": "end"})
        while self._host_runs and not server.at_end and time.monotonic() < deadline:
            select.select([server], [], [], max(0.0, deadline - time.monotonic()))
            self._host_runs = all(message["kind"] != "host-ended" for message in server.receive_ready())
        return not self._host_runs

    # ---- hearing

    def _wait(self) -> set[int]:
        """Descriptors with news, once there are any or something else is due."""
        poll = select.poll()
        channels = (self._server.channel, self._host, *(worker.channel for worker in self._workers.values()))
        poll.register(self._interrupts, select.POLLIN)
        for channel in channels:
            if channel is not None and not channel.at_end:
                poll.register(channel, select.POLLIN)
        due = [at - time.monotonic() for at in (self._deadline, self._watcher.due) if at is not None]
        due += [_TAIL_SECONDS] if self._tail is not None else []
        ready = {fd for fd, _ in poll.poll(max(0.0, min(due)) * 1000 if due else None)}
        if self._tail is not None:
            self._tail.follow()
        return ready

    def _hear(self, ready: set[int]) -> None:
        if self._interrupts.fileno() in ready:
            self._hear_signals()
        if self._host is not None and self._host.fileno() in ready:
            self._hear_host(self._host)
        for member, worker in self._workers.items():
            if worker.channel.fileno() in ready:
                self._hear_worker(member, worker)
        if self._server.channel.fileno() in ready:
            self._hear_server()

    def _hear_signals(self) -> None:
        for number in self._interrupts.take():
            self._feed(KillRequested(number) if self._interrupted else StopRequested(number))
            self._interrupted = True

    def _hear_worker(self, member: str, worker: _Worker) -> None:
        for message in worker.channel.receive_ready():
            match message["kind"]:
                case "event":
                    if message["event"].get("kind") == "stopping":
                        self._feed(AtSafePoint())
                    self._on_event(member, message["event"])
                case "stands":
                    self._watcher.heard(member, message)
                case "joined":
                    worker.joined(message["pid"], worker.channel.take_fd())
                    self._feed(Joined(member))
                case _:
                    worker.last_word = message

    def _hear_host(self, host: Channel) -> None:
        for message in host.receive_ready():
            match message["kind"]:
                case "event":
                    self._on_event("host", message["event"])
                case "prepared":
                    self._obey(self._coordinator.start())
                case "ended":
                    self._worker_ended(message)
                case _:
                    self._stop_with(judge("host", None, 1, time.monotonic(), message))

    def _hear_server(self) -> None:
        for message in self._server.channel.receive_ready():
            if message["kind"] == "refused":
                raise LaunchError(message["text"])
            self._host_runs = False
            if self._host is not None:
                self._hear_host(self._host)  # its last word says more than its exit status
            self._stop_with(judge("host", None, message["status"], time.monotonic(), None))
        if self._server.channel.at_end:
            raise LaunchError(f"the fork server ended unexpectedly (exit status {self._server.close()}); start again")

    def _worker_ended(self, message: Message) -> None:
        member, status = message["member"], message["status"]
        worker = self._workers[member]
        self._hear_worker(member, worker)  # all it said is here by now; judge it by the last of it
        worker.channel.at_end = True
        failure: Failure | None
        if message["refusal"]:
            failure = Failure(member, worker.rank, "user", message["refusal"], LaunchError.exit_code)
        else:
            failure = judge(member, worker.rank, status, message["time"], worker.last_word)
            if failure is not None and worker.last_word is None:
                failure = self._tell_its_place(failure, worker)
        if failure is None and worker.last_word is not None:
            self._results[member] = worker.last_word["result"]
        self._feed(Ended(member, status, failure))

    def _look_for_a_hang(self) -> None:
        now = time.monotonic()
        hang = self._watcher.look(now, lambda member: self._workers[member].seen())
        if hang is None:
            self._tell(self._watcher.to_ask(now), {"kind": "where"})
            return
        text = f"{hang.text}; where that is only slow, --hang-after SECONDS waits longer"
        failure = Failure("launcher", None, "hang", text, 1, time=now)
        self._feed(Hung(_blaming(hang.culprit, failure)))

    def _tell_its_place(self, failure: Failure, worker: _Worker) -> Failure:
        """Of one that ended without a word, the record tells where."""
        if not worker.record.moves:
            return failure
        if failure.exit_code == 128 + signal.SIGABRT and self._logged(failure.member, _SIZES_DIFFER):
            named = [(member, self._workers[member]) for member in self._watcher.members]
            together = [Standing(each.rank, m, each.record.coordinates, each.record.doing()) for m, each in named]
            found = judge_sizes(together, worker.rank)
            return _blaming(found.culprit, replace(failure, text=found.text))
        text = f"{failure.text}; it was {worker.record.doing()}"
        return replace(failure, text=text, coordinates=worker.record.coordinates)

    def _logged(self, member: str, words: bytes) -> bool:
        """Whether the end of a member's log has the words."""
        log = self._job.log_of(member)
        with suppress(OSError):
            return log is not None and words in log.read_bytes()[-_LOG_BYTES:]
        return False

    # ---- doing

    def _feed(self, event: Event) -> None:
        self._obey(self._coordinator.handle(event))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Spawn(member, rank):
                    self._spawn(member, rank)
                case Announce(epoch):
                    self._results.clear()
                    self._watcher.begin(epoch.members, time.monotonic())
                    self._tell(epoch.members, {"kind": "epoch", **epoch.to_message()})
                case AskToStop(members):
                    self._tell(members, {"kind": "stop"})
                case Break(members):
                    self._watcher.end()  # what is being ended is not watched
                    self._tell(members, {"kind": "break"})
                case Terminate(members):
                    self._signal(members, signal.SIGTERM)
                case Kill(members):
                    self._signal(members, signal.SIGKILL)
                case Wait(seconds):
                    self._deadline = time.monotonic() + seconds
                case Finish():
                    self._finish = command

    def _spawn(self, member: str, rank: int) -> None:
        log = self._job.log_of(member)
        if rank == 0 and log is not None:
            if self._tail is not None:
                self._tail.follow()  # of the member before, to its end
            self._tail = Tail(log, self._on_output)
        channel, theirs = channel_pair()
        self._workers[member] = _Worker(rank, channel)
        with theirs:
            self._tell_host({"kind": "spawn", "member": member}, [theirs.fileno()])

    def _signal(self, members: tuple[str, ...], number: int) -> None:
        for member in members:
            self._tell_host({"kind": "signal", "member": member, "signal": number})

    def _tell(self, members: tuple[str, ...], message: Message) -> None:
        for member in members:
            with suppress(ConnectionError):  # it has ended; the host is about to say so
                self._workers[member].channel.send(message)

    def _tell_host(self, message: Message, fds: Sequence[int] = ()) -> None:
        if self._host is not None:
            with suppress(ConnectionError):  # likewise, the server
                self._host.send(message, fds)

    def _stop_with(self, failure: Failure | None) -> None:
        """Ends the job for a failure that is no member's."""
        if self._finish is None:
            failure = failure or Failure("host", None, "program", "the host ended before its workers", 1)
            self._finish = Finish(failure.exit_code, failure)

    def _close_logs(self) -> None:
        """The rest of what the lowest rank printed; and each failure in its member's log, for later readers."""
        if self._tail is not None:
            self._tail.follow()
        failure = self._finish.failure if self._finish is not None else None
        for member, worker in self._workers.items():
            log, word = self._job.log_of(member), worker.last_word
            told = word["whole"] if word is not None and word["kind"] == "failed" else ""
            if failure is not None and failure.kind == "hang" and failure.member == member:
                told = f"{told}\n{failure}".lstrip()
            if log is not None and told:
                with suppress(OSError), log.open("a") as file:  # a full disk must not hide the failure itself
                    file.write(told + "\n")


def _blaming(culprit: Standing | None, failure: Failure) -> Failure:
    if culprit is None:
        return failure
    return replace(failure, member=culprit.member, rank=culprit.rank, coordinates=culprit.coordinates)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
