"""Towers on ranks: a rank for each, or, where ``pp`` stands beside ``branch``, several, with a tower's stages on them.

What the towers have in common, before they part and after they meet, is a part of the pipeline as well. It lies on
their first ranks and on their last ones, whole or dealt over several, whichever makes the longest rank shortest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Final

from torch import fx

from stretto.errors import Refused
from stretto.graph.assignment import Assignment
from stretto.graph.balance import BYTES_PER_SECOND, balanced
from stretto.graph.stages import Work, module_of

ROUNDED: Final = 1 + 1e-9
LEAST_GAIN: Final = 0.05  # of the longest rank's time, so that what is common is worth more pieces

Span = tuple[int, int]
"""Places in ``Work.nodes``, from the first to before the second, that can't be parted."""
Spot = tuple[int, int]
"""A lane, and which of its stretches."""


@dataclass(frozen=True)
class Group:
    """Operations that run after those of the groups before it, but for towers, which wait for none beside them.

    Args:
        spans: in an order in which they can run.
        lane: the tower's; None: what towers have in common.
    """

    spans: tuple[Span, ...]
    lane: int | None = None


@dataclass(frozen=True)
class Shape:
    """How many ranks towers lie on: ``branch`` lanes of ``pp`` ranks, each with ``chunks`` stretches of its lane."""

    branch: int
    pp: int = 1
    chunks: int = 1

    @property
    def stretches(self) -> int:
        """Of each lane."""
        return self.pp * self.chunks

    def rank(self, spot: Spot) -> int:
        """Its place on the line."""
        return spot[0] * self.pp + spot[1] % self.pp


def assigned(work: Work, costs: Sequence[float], groups: Sequence[Group], shape: Shape) -> Assignment:
    """A stage of each group on each rank that has something of it; the last one is on the last rank.

    Args:
        costs: seconds of each of ``work.nodes``; only looked at where lanes are cut.

    Raises:
        Refused: a tower can't be cut into so many stages.
    """
    spread = _Spread(work, costs, groups, shape)
    of = spread.ranks() if shape.stretches > 1 else spread.uncut()
    stages, ranks = [0] * len(work.nodes), list[int]()
    for group in groups:
        now = None
        for first, end in group.spans:
            if of[first, end] != now:
                ranks.append(now := of[first, end])
            stages[first:end] = [len(ranks) - 1] * (end - first)
    if groups[-1].lane is not None:
        ranks.append(shape.branch * shape.pp - 1)  # whence the output comes
    return Assignment(tuple(stages), tuple(ranks))


def shared_module(nodes: Iterable[fx.Node]) -> str:
    """The module that they have in common, or the first one."""
    paths = [path.split(".") for node in nodes if (path := module_of(node))]
    if not paths:
        return "operations outside any module"
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join([parts[0] for parts in alike] or paths[0])


class _Spread:
    """Lanes, and what comes before and after them."""

    def __init__(self, work: Work, costs: Sequence[float], groups: Sequence[Group], shape: Shape) -> None:
        self._work, self._shape, self._costs = work, shape, costs
        self._last = shape.branch - 1
        self._stem = groups[0].spans if groups[0].lane is None else ()
        self._head = groups[-1].spans if groups[-1].lane is None else ()
        inner = groups[bool(self._stem) : len(groups) - bool(self._head)]
        lane = self._lane_of(inner)
        self._lanes = [
            [span for group in inner if lane[group] == at for span in group.spans] for at in range(shape.branch)
        ]

    def _lane_of(self, groups: Sequence[Group]) -> dict[Group, int]:
        """Of each group its lane. What lies between towers is the last one's where that is one rank; else, the longest
        first, that lane's which has least to do."""
        lane = {group: self._last if group.lane is None else group.lane for group in groups}
        if self._shape.stretches > 1:
            took = {group: sum(map(self._seconds, group.spans)) for group in groups}
            loads = [sum(took[group] for group in groups if group.lane == at) for at in range(self._shape.branch)]
            for group in sorted((one for one in groups if one.lane is None), key=lambda one: -took[one]):
                lane[group] = min(range(self._shape.branch), key=lambda at: (loads[at], -at))
                loads[lane[group]] += took[group]
        return lane

    def uncut(self) -> dict[Span, int]:
        """The rank of each span, where a lane is one."""
        found = dict.fromkeys((*self._stem, *self._head), self._last)
        return found | {span: lane for lane, spans in enumerate(self._lanes) for span in spans}

    def ranks(self) -> dict[Span, int]:
        """The rank of each span, so that the longest rank is as short as it can be. What is common lies whole on a
        rank, or in as few pieces as make up for their messages."""
        self._check()
        head = [(self._last, self._shape.stretches - 1)] * len(self._head)
        least, found = self._cut([*[(0, 0)] * len(self._stem), *head])
        tries = [self._dealt(depth) for depth in range(1, self._shape.pp + 1)] if self._stem or self._head else []
        for spots in dict.fromkeys(map(tuple, tries)):
            longest, ranks = self._cut(spots)
            if longest < (1 - LEAST_GAIN) * least:
                least, found = longest, ranks
        return found

    def _check(self) -> None:
        shape, fewest = self._shape, min(self._lanes, key=len)
        if len(fewest) >= shape.stretches:
            return
        name = shared_module(node for first, end in fewest for node in self._work.nodes[first:end])
        times = " (pp times chunks)" if shape.chunks > 1 else ""
        most = len(fewest) // shape.chunks
        instead = f"branch={shape.branch},pp={most}" if most > 1 else f"branch={shape.branch} without pp"
        raise Refused(
            f"plan: branch={shape.branch} beside pp={shape.pp} cuts each tower into {shape.stretches} stages{times}, "
            f"and {name} can be cut into {len(fewest)}; use {instead}"
        )

    def _cut(self, spots: Sequence[Spot]) -> tuple[float, dict[Span, int]]:
        """The lanes in stretches, beside what is common at its spots; and the seconds of the longest rank."""
        common = (*self._stem, *self._head)
        already = [[0.0] * self._shape.stretches for _ in self._lanes]
        for span, spot, follows, passing in zip(common, spots, (*spots[1:], None), self._passing, strict=False):
            already[spot[0]][spot[1]] += self._seconds(span) + (passing if follows != spot else 0.0)
        found = {span: self._shape.rank(spot) for span, spot in zip(common, spots, strict=True)}
        ranks = [0.0] * (self._shape.branch * self._shape.pp)
        for lane, spans in enumerate(self._lanes):
            seconds, stretches = self._stretches(spans, already[lane])
            for at, each in enumerate(seconds):
                ranks[self._shape.rank((lane, at))] += each
            found |= {span: self._shape.rank((lane, at)) for span, at in zip(spans, stretches, strict=True)}
        return max(ranks), found

    def _stretches(self, spans: Sequence[Span], already: Sequence[float]) -> tuple[list[float], list[int]]:
        """Of each stretch of a lane its seconds, what there is ``already`` too; and of each span its stretch."""
        places = [place for span in spans for place in range(*span)]
        costs, crossing = [self._costs[place] for place in places], self._work.crossing_bytes(places)
        edges = list(accumulate(end - first for first, end in spans))[:-1]
        starts = balanced(costs, edges, crossing, len(already), already)
        bounds = [*pairwise([0, *starts, len(costs)])]
        passing = [*(crossing[start] / BYTES_PER_SECOND for start in starts), 0.0]
        seconds = [sum(costs[one:end]) + p + a for (one, end), p, a in zip(bounds, passing, already, strict=True)]
        return seconds, [sum(start <= edge for start in starts) for edge in [0, *edges]]

    @cached_property
    def _passing(self) -> list[float]:
        """Of each span of what is common the seconds that it takes to send what would pass its end."""
        found = []
        for spans in (self._stem, self._head):
            crossing = self._work.crossing_bytes([place for span in spans for place in range(*span)])
            ends = list(accumulate(end - first for first, end in spans))
            found += [crossing[end] / BYTES_PER_SECOND if end < len(crossing) else 0.0 for end in ends]
        return found

    def _dealt(self, depth: int) -> list[Spot]:
        """What is common in pieces, where the lanes have room: what comes before them on the first ``depth`` ranks of
        each, what comes after on the last, so that it goes on as the lanes do. The model's last unit is where its
        output comes out."""
        shape, head = self._shape, list(reversed(self._head))
        towers = [sum(map(self._seconds, spans)) for spans in self._lanes]
        common = sum(map(self._seconds, (*self._stem, *self._head)))
        longest = max((sum(towers) + common) / (shape.branch * shape.pp), max(towers) / shape.pp)
        left = [shape.pp * longest - own for own in towers]
        first = [(lane, at) for at in range(depth) for lane in range(shape.branch)]
        last = [(shape.branch - 1 - lane, shape.stretches - 1 - at) for lane, at in first]
        if head:
            left[-1] -= self._seconds(head[0])
        rooms = [[longest - self._seconds(spans[end]) for spans in self._lanes] for end in (0, -1)]
        before = self._deal(self._stem, first, left, rooms[0])
        after = [*last[: len(head[:1])], *self._deal(head[1:], last, left, rooms[1])]
        return [*before, *reversed(after)]

    def _deal(
        self, spans: Sequence[Span], order: Sequence[Spot], left: list[float], rooms: Sequence[float]
    ) -> list[Spot]:
        """Each span to the first spot that has room for it: one of ``rooms``, by lane, beside the least of a tower that
        any rank of it has; ``left`` is what each lane has in all."""
        found: list[Spot] = []
        at, room = -1, 0.0
        for span in spans:
            seconds = self._seconds(span)
            while (at < 0 or seconds > ROUNDED * room) and at < len(order) - 1:
                at += 1
                room = min(rooms[order[at][0]], left[order[at][0]])
            room -= seconds
            left[order[at][0]] -= seconds
            found.append(order[at])
        return found

    def _seconds(self, span: Span) -> float:
        return self._before[span[1]] - self._before[span[0]]

    @cached_property
    def _before(self) -> list[float]:
        return [0.0, *accumulate(self._costs)]
