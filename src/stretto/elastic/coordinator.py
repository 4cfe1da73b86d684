"""The protocol that starts members, forms their epoch and ends them: events in, commands out, no I/O, no clock.

Whoever runs it (a launcher) does what the commands say, in order, and feeds back what happened. Phases::

    gathering --all joined--> running --a bad end--> ending --all ended--> finished
        ^                        |                     |
        |                        +--all ended well-----|--------------------> finished
        +-----------------------respawn----------------+

Two promises, whatever the order of events: a job has exactly one Finish, and no epoch is announced with a number of
members other than the one asked for. Ending the rest is a ladder (break their group, terminate, kill, give up), one
rung for each grace that passes, so that a member asleep in a collective gets the chance to say what it saw.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from signal import SIGTERM

from stretto.elastic.epoch import MembershipEpoch
from stretto.elastic.failure import Failure, first_cause
from stretto.elastic.policy import Decision, Policy

# ---- events


@dataclass(frozen=True)
class Joined:
    """A member runs and waits for its epoch."""

    member: str


@dataclass(frozen=True)
class Ended:
    """A member's process has ended, after everything it said was heard; well where ``failure`` is None."""

    member: str
    status: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Hung:
    """Nothing moves any more; ``failure`` names the member that holds the others up, or none."""

    failure: Failure


@dataclass(frozen=True)
class StopRequested:
    """The job shall end cleanly, at the members' next safe point. Once is enough; more change nothing."""

    signal: int


@dataclass(frozen=True)
class AtSafePoint:
    """The members have heard that they shall end, and are saving: they may take the time that it takes."""


@dataclass(frozen=True)
class KillRequested:
    """The job shall end at once."""

    signal: int


@dataclass(frozen=True)
class GraceOver:
    """The time of the last :class:`Wait` has passed."""


Event = Joined | Ended | Hung | StopRequested | AtSafePoint | KillRequested | GraceOver

# ---- commands


@dataclass(frozen=True)
class Spawn:
    """Start a member's process."""

    member: str
    rank: int


@dataclass(frozen=True)
class Announce:
    """Tell all members of the epoch that it begins."""

    epoch: MembershipEpoch


@dataclass(frozen=True)
class AskToStop:
    """Ask these members to end at their next safe point."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Break:
    """Tell these members to break their group, from a watching thread."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Terminate:
    """Send these members SIGTERM."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """Send these members SIGKILL."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Feed back GraceOver after so long. Replaces the last Wait."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """The job is over; whatever still runs of it is to be killed. No command follows."""

    exit_code: int
    failure: Failure | None


Command = Spawn | Announce | AskToStop | Break | Terminate | Kill | Wait | Finish


@dataclass(frozen=True)
class Graces:
    """How long the rest of a failed job has on each rung of the ladder, and a job that got SIGTERM to its next safe
    point. (After a Ctrl-C the person at the keyboard decides, by another one.)"""

    break_seconds: float = 5.0
    terminate_seconds: float = 2.0
    kill_seconds: float = 2.0
    stop_seconds: float = 60.0


class Coordinator:
    """The state of one job. Call :meth:`start` once, then :meth:`handle` for every event until a Finish comes."""

    def __init__(
        self,
        num_workers: int,
        policy: Policy,
        store: str,
        *,
        first_member: int = 1,
        attempt: int = 1,
        graces: Graces | None = None,
    ) -> None:
        """Args: ``store`` is a URL; each epoch meets at ``<store>/epoch-<number>``."""
        if num_workers < 1:
            raise ValueError(f"expected at least 1 worker, got {num_workers}")
        self._num_workers = num_workers
        self._policy = policy
        self._store = store
        self._graces = graces or Graces()
        self._next_member = first_member
        self._attempt = attempt
        self._epoch = 0
        self._members: tuple[str, ...] = ()
        self._joined: set[str] = set()
        self._alive: set[str] = set()
        self._forced: set[str] = set()
        self._failures: list[Failure] = []
        self._gathering = True
        self._rung: int | None = None  # None while nothing is being ended
        self._respawn = False
        self._stop_signal: int | None = None
        self._safe = False
        self.finished = False

    def start(self) -> list[Command]:
        """The first members."""
        return self._spawn()

    def handle(self, event: Event) -> list[Command]:
        """What follows from an event; nothing from one about a member that is not, or no longer, part of the job."""
        if self.finished:
            return []
        match event:
            case Joined(member):
                return self._on_joined(member)
            case Ended(member, status, failure):
                return self._on_ended(member, status, failure) if member in self._alive else []
            case Hung(failure):
                return self._on_hung(failure)
            case StopRequested(signal):
                return self._on_stop(signal)
            case AtSafePoint():
                self._safe = True
                return []
            case KillRequested(signal):
                self._stop_signal = signal
                self._failures.clear()  # what the killed still say is nobody's fault
                return self._finish()
            case GraceOver():
                return self._next_rung() if self._rung is not None else self._end_the_deaf()

    def _spawn(self) -> list[Command]:
        first = self._next_member
        self._next_member += self._num_workers
        self._members = tuple(f"m{number}" for number in range(first, self._next_member))
        self._alive, self._joined, self._forced = set(self._members), set(), set()
        self._gathering, self._rung, self._respawn = True, None, False
        return [Spawn(member, rank) for rank, member in enumerate(self._members)]

    def _on_joined(self, member: str) -> list[Command]:
        if not self._gathering or self._rung is not None or member not in self._alive:
            return []
        self._joined.add(member)
        if len(self._joined) < self._num_workers:
            return []
        self._gathering = False
        self._epoch += 1
        store = f"{self._store}/epoch-{self._epoch}"
        return [Announce(MembershipEpoch(self._epoch, self._members, store, self._attempt))]

    def _on_ended(self, member: str, status: int, failure: Failure | None) -> list[Command]:
        self._alive.discard(member)
        if failure is None and self._gathering:  # an end before the epoch is a missing worker, however polite
            text = f"member {member} ended before all {self._num_workers} workers had started"
            failure = Failure(member, self._members.index(member), "signal", text, 1)
        commands: list[Command] = []
        if failure is not None:
            if member in self._forced:
                failure = dataclasses.replace(failure, consequence=True)
            self._failures.append(failure)
            if self._rung is None:
                commands = self._answer(self._decide(member, status))
        return commands if self._alive else self._all_ended()

    def _on_hung(self, failure: Failure) -> list[Command]:
        if self._gathering or self._rung is not None:
            return []
        self._failures.append(failure)
        decision = self._decide(failure.member, failure.exit_code)
        return self._answer("stop" if decision == "continue" else decision)  # a hang can't be left alone

    def _decide(self, member: str, status: int) -> Decision:
        decision = self._policy.on_end(member, status)
        if decision == "continue" and self._gathering:
            return "stop"  # fewer workers than asked are never accepted
        if decision == "respawn" and self._stop_signal is not None:
            return "stop"
        return decision

    def _answer(self, decision: Decision) -> list[Command]:
        if decision == "continue":
            return []
        self._respawn = decision == "respawn"
        self._rung = -1
        return self._next_rung()

    def _next_rung(self) -> list[Command]:
        assert self._rung is not None
        self._rung += 1
        rest, graces = self._in_rank_order(self._alive), self._graces
        match self._rung:
            case 0:
                return [Break(rest), Wait(graces.break_seconds)]
            case 1:
                self._forced |= self._alive
                return [Terminate(rest), Wait(graces.terminate_seconds)]
            case 2:
                return [Kill(rest), Wait(graces.kill_seconds)]
            case _:
                return self._finish()

    def _all_ended(self) -> list[Command]:
        if not self._respawn or self._stop_signal is not None:
            return self._finish()
        self._failures.clear()
        self._attempt += 1
        return self._spawn()

    def _on_stop(self, signal: int) -> list[Command]:
        if self._stop_signal is not None:
            return []
        self._stop_signal = signal
        if self._rung is not None:
            return []
        # Before the epoch there is nothing to save.
        if self._gathering:
            return self._finish()
        asked = AskToStop(self._in_rank_order(self._alive))
        return [asked, Wait(self._graces.stop_seconds)] if signal == SIGTERM else [asked]

    def _end_the_deaf(self) -> list[Command]:
        """Whoever sends SIGTERM sends SIGKILL next, and then nobody says why there is no later checkpoint."""
        if self._stop_signal is None or self._safe:
            return []
        text = (
            f"the workers came to no safe point within {self._graces.stop_seconds:g} s of SIGTERM, so they were ended; "
            "what came after the last checkpoint is lost"
        )
        self._failures.append(Failure("launcher", None, "signal", text, 128 + self._stop_signal))
        return self._answer("stop")

    def _finish(self) -> list[Command]:
        self.finished = True
        failure = first_cause(self._failures)
        if failure is not None:
            return [Finish(failure.exit_code, failure)]
        return [Finish(0 if self._stop_signal is None else 128 + self._stop_signal, None)]

    def _in_rank_order(self, members: set[str]) -> tuple[str, ...]:
        return tuple(member for member in self._members if member in members)
