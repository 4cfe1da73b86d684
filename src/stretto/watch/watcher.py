"""Asks all members where they are, time and again, and notices when nothing moves. No clock and no channel of its own.

It counts the rounds in which all gave the same answers as before, rather than look at the time alone: while the asking
process itself was stopped (Ctrl-Z), the members went on unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from stretto.watch.hang import Hang, Message, Standing, State, judge_hang
from stretto.watch.record import Record

SILENT_SECONDS: Final = 1.0  # a machine with too much to do answers late, a stopped process never
_MOST_SECONDS, _LEAST_SECONDS = 10.0, 0.25
_ROUNDS: Final = 8

Answer = dict[str, Any]


@dataclass
class Subject:
    """What can be seen of a member without its help: its process, and the record that it keeps."""

    state: State = "answers"
    record: Record = field(default_factory=Record)


class Watcher:
    """Watches the members of one epoch after another. ``hang_after``: seconds; 0 watches nothing."""

    def __init__(self, hang_after: float) -> None:
        self._hang_after = hang_after
        self._longest = min(_MOST_SECONDS, max(_LEAST_SECONDS, hang_after / _ROUNDS))
        self.members: tuple[str, ...] = ()
        self.due: float | None = None

    def begin(self, members: Sequence[str], now: float) -> None:
        """The epoch of ``members``, in rank order, begins. A lone member has nobody to wait for, and is not watched."""
        self.members = tuple(members)
        self._answers: dict[str, Answer] = {}
        self._asked: dict[str, float] = {}  # who has yet to answer
        self._moves: dict[str, int] = {}
        self._still = 0.0
        self._interval, self._looked, self._moved = _LEAST_SECONDS, now, False
        self.due = now + self._interval if self._hang_after and len(members) > 1 else None

    def end(self) -> None:
        """The epoch is over."""
        self.due = None

    def heard(self, member: str, answer: Answer) -> None:
        """A member's answer."""
        self._asked.pop(member, None)
        self._moved |= answer["mark"] != self._answers.get(member, {}).get("mark")
        self._answers[member] = answer

    def look(self, now: float, subject_of: Callable[[str], Subject]) -> Hang | None:
        """To be called when it is :attr:`due`; looks at each member by ``subject_of``. Then ask whom :meth:`to_ask`
        names."""
        subjects = [subject_of(member) for member in self.members]
        moves = {member: each.record.moves for member, each in zip(self.members, subjects, strict=True)}
        self._moved |= moves != self._moves
        self._moves = moves
        passed = min(now - self._looked, 2 * self._interval)
        self._still = 0.0 if self._moved else self._still + passed
        self._looked, self._moved = now, False
        self._interval = min(2 * self._interval, self._longest)
        self.due = now + self._interval
        late = [asked + SILENT_SECONDS for asked in self._asked.values() if asked + SILENT_SECONDS > now]
        if self._still < self._hang_after or late:  # an answer that may still come may say that all is well
            return None
        return judge_hang([self._standing(rank, each) for rank, each in enumerate(subjects)], self._hang_after)

    def to_ask(self, now: float) -> tuple[str, ...]:
        """Whom to ask now: nobody who owes an answer, so that no channel fills up."""
        found = tuple(member for member in self.members if member not in self._asked)
        self._asked.update(dict.fromkeys(found, now))
        return found

    def _standing(self, rank: int, subject: Subject) -> Standing:
        member, record = self.members[rank], subject.record
        answer = self._answers.get(member, {})
        if answer.get("moves") != record.moves:
            answer = {}  # it went on after that
        state: State = "silent" if subject.state == "answers" and member in self._asked else subject.state
        told = {key: answer.get(key, "") for key in ("place", "waits_in", "loading")}
        awaited = answer.get("awaited", {})
        found = Standing(rank, member, record.coordinates, record.doing(), **told, state=state)
        return replace(found, message=Message(awaited.get("sender"), awaited.get("after", 0), awaited.get("passed", 0)))


def state_of_process(pid: int) -> State:
    """Whether a process of this machine is stopped or has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return "ended"
    return "stopped" if letter in b"Tt" else "ended" if letter in b"ZX" else "answers"
