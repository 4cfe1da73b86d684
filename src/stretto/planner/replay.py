"""Several ranks' notes played together: when each would have gone on, had the others been there.

Each rank's own work took what it took; a collective begins once all its members have come to it, a message is there
once it was sent, and both take what the links of the cluster take. So stragglers, uneven stages, bubbles and what
communication hides come out of the notes, for any strategy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Event = tuple[Any, ...]
"""``("work", seconds)``, ``("begin", number, kind, members, bytes)``, ``("wait", number)``, ``("send", number, to,
bytes, tag)``, ``("receive", number, source, bytes, tag)`` or ``("await", number)``; numbers are a rank's own."""


class Prices(Protocol):
    """What the links of a cluster take."""

    @property
    def background(self) -> bool:
        """Whether calls go on while their rank works; else they do while it waits."""

    def collective(self, kind: str, members: Sequence[int], num_bytes: int, rested: float = 0.0) -> float:
        """Seconds from when all have come, who had sent nothing for ``rested`` seconds."""

    def message(self, source: int, to: int, num_bytes: int, rested: float = 0.0) -> float:
        """Seconds of one message from one rank to another, likewise."""

    def pace(self, rank: int) -> float:
        """How long the rank works for what took a second when it was rehearsed."""


@dataclass(frozen=True)
class Replayed:
    """A step of all ranks.

    Args:
        seconds: until the last rank is done.
        work: of each rank, without what it waited.
        exposed: of each rank, seconds in which it did nothing but communicate or wait, by kind of call.
    """

    seconds: float
    work: tuple[float, ...]
    exposed: tuple[dict[str, float], ...]


@dataclass
class _Collective:
    kind: str
    members: tuple[int, ...]
    num_bytes: int
    came: dict[int, float] = field(default_factory=dict)
    end: float | None = None


@dataclass
class _Rank:
    events: Sequence[Event]
    at: int = 0
    clock: float = 0.0
    work: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[int, Any] = field(default_factory=dict)  # by number: a collective, or the key of a message

    def until(self, end: float, kind: str) -> None:
        """Goes on then."""
        if end > self.clock:
            self.exposed[kind] += end - self.clock
            self.clock = end


class _Play:
    def __init__(self, ranks: Sequence[Sequence[Event]], prices: Prices) -> None:
        self.ranks = [_Rank(events) for events in ranks]
        self._prices = prices
        self._collectives: dict[tuple[tuple[int, ...], int], _Collective] = {}
        self._ended: dict[tuple[int, ...], int] = defaultdict(int)
        self._busy: dict[Any, float] = {}  # until when: members who talk, or one who sends to another
        self._posted: dict[Any, list[tuple[float, int]]] = defaultdict(list)  # by whoever has come, when
        self._sent: dict[tuple[int, int], list[Any]] = defaultdict(list)  # keys of messages, by who sends to whom
        self._arrived: dict[Any, float] = {}

    def run(self) -> None:
        """Raises ValueError where ranks wait for one another for ever."""
        moved = True
        while moved:
            moved = False
            for place, rank in enumerate(self.ranks):
                while rank.at < len(rank.events) and self._one(place, rank, rank.events[rank.at]):
                    rank.at += 1
                    moved = True
        stuck = [place for place, rank in enumerate(self.ranks) if rank.at < len(rank.events)]
        if stuck:
            events = ", ".join(f"rank {place} in {self.ranks[place].events[self.ranks[place].at]}" for place in stuck)
            raise ValueError(f"the ranks' notes don't fit together: {events}")

    def _one(self, place: int, rank: _Rank, event: Event) -> bool:
        """Whether the rank could go on."""
        handle = getattr(self, f"_{event[0]}")
        return bool(handle(place, rank, *event[1:]))

    def _work(self, place: int, rank: _Rank, seconds: float) -> bool:
        took = seconds * self._prices.pace(place)
        rank.clock += took
        rank.work += took
        return True

    def _begin(self, place: int, rank: _Rank, number: int, kind: str, members: tuple[int, ...], size: int) -> bool:
        key = members, rank.counts[members]
        rank.counts[members] += 1
        call = self._collectives.setdefault(key, _Collective(kind, members, size))
        if call.kind != kind:
            raise ValueError(f"the ranks' notes don't fit together: rank {place} is in {kind}, others in {call.kind}")
        call.came[place] = rank.clock
        call.num_bytes = max(call.num_bytes, size)
        rank.calls[number] = key
        return True

    def _wait(self, place: int, rank: _Rank, number: int) -> bool:
        members, index = rank.calls[number]
        for before in range(self._ended[members], index + 1):
            call = self._collectives[members, before]
            if len(call.came) < len(members):
                return False
            begun = max(call.came.values())
            free = self._busy.get(members, -math.inf)
            if self._prices.background:
                begun = max(begun, free)
            cost = self._prices.collective(call.kind, members, call.num_bytes, max(0.0, begun - free))
            call.end = self._busy[members] = begun + cost
            self._ended[members] = before + 1
        call = self._collectives[members, index]
        assert call.end is not None
        if self._prices.background or rank.clock <= max(call.came.values()):
            rank.until(call.end, call.kind)
        else:  # it went on working, and takes its part in the call now
            rank.until(rank.clock + call.end - max(call.came.values()), call.kind)
        return True

    def _send(self, place: int, rank: _Rank, number: int, to: int, size: int, tag: int) -> bool:
        way = place, to, tag
        key = *way, rank.counts[way]
        rank.counts[way] += 1
        if self._prices.background:
            self._posted[key].append((rank.clock, size))
            self._sent[place, to].append(key)
        else:
            rank.until(rank.clock + self._prices.message(place, to, size) / 2, "send")
            self._arrived[key] = rank.clock
        rank.calls[number] = "sent", key
        return True

    def _receive(self, place: int, rank: _Rank, number: int, source: int, size: int, tag: int) -> bool:
        way = source, place, tag
        received = "received", way
        key = *way, rank.counts[received]
        rank.counts[received] += 1
        rank.calls[number] = size, key
        if self._prices.background:
            self._posted[key].append((rank.clock, size))
        return True

    def _leave(self, key: tuple[Any, ...]) -> bool:
        """Whether a message could go, in the background, after those sent before it that can. It goes once both sides
        are there: Gloo and NCCL keep none for a receiver to come."""
        if len(self._posted[key]) < 2:
            return False
        source, to, *_ = key
        for other in self._sent[source, to]:
            if other not in self._arrived and len(posted := self._posted[other]) == 2:
                before = self._busy.get((source, to), -math.inf)
                begun = max(before, *(clock for clock, _ in posted))
                cost = self._prices.message(source, to, max(size for _, size in posted), begun - before)
                self._arrived[other] = self._busy[source, to] = begun + cost
            if other == key:
                break
        return True

    def _await(self, place: int, rank: _Rank, number: int) -> bool:
        what, key = rank.calls[number]
        if key not in self._arrived and not self._leave(key):
            return False
        if what == "sent":
            rank.until(self._arrived[key] if self._prices.background else rank.clock, "send")
            return True
        end = max(rank.clock, self._arrived[key])
        if not self._prices.background:
            end += self._prices.message(key[0], place, what) / 2
        rank.until(end, "receive")
        return True


def replay(ranks: Sequence[Sequence[Event]], prices: Prices) -> Replayed:
    """Plays one step.

    Args:
        ranks: of each rank what it did, in order.

    Raises:
        ValueError: the ranks' notes don't fit together.
    """
    play = _Play(ranks, prices)
    play.run()
    done = play.ranks
    return Replayed(
        max((rank.clock for rank in done), default=0.0),
        tuple(rank.work for rank in done),
        tuple(dict(rank.exposed) for rank in done),
    )
