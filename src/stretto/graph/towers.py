"""Towers: parts of a model that don't depend on each other, found in its graph, and a rank for each of them.

Where one operation comes before or after every other, the graph has a *waist*: nothing runs beside it. Of what lies
between two waists, what hangs together is a tower, or what comes of one of its beginnings alone. Such towers either run
side by side, the longest first to the rank that has least to do (Graham 1969, "Bounds on multiprocessing timing
anomalies"), or stay together and are looked into one by one, as each may have waists of its own: whichever saves more.
All else, the way there and on, is the last rank's, where the model's output comes out; where each tower has several
ranks, it is dealt to these (:mod:`stretto.graph.lanes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from torch import fx

from stretto.errors import Refused
from stretto.graph.assignment import Assignment
from stretto.graph.balance import BYTES_PER_SECOND
from stretto.graph.effects import draws_in, writes
from stretto.graph.lanes import Group, Shape, assigned, shared_module
from stretto.graph.stages import MESSAGE_BYTES, Work, num_bytes_of

LEAST_SAVED: Final = 0.1  # of a model's time, so that towers are worth ranks
DEEPEST: Final = 100  # towers within towers, and joins one after the other
LEAST_TOWER: Final = 0.01  # of a model's time; less than that is no tower


@dataclass(frozen=True)
class _Tower:
    """Units that run one after the other, and the seconds that they take; ``sends``: what passes in and out takes."""

    units: tuple[int, ...]
    seconds: float
    sends: float


@dataclass(frozen=True)
class _Piece:
    """What runs before the next piece does: units of the last rank, or towers side by side, each with its rank."""

    common: tuple[int, ...] = ()
    towers: tuple[tuple[_Tower, int], ...] = ()
    saved: float = 0.0
    sends: float = 0.0


def find_towers(
    work: Work, costs: Sequence[float], degree: int, pp: int = 1, chunks: int = 1
) -> tuple[Assignment, tuple[str, ...]]:
    """Towers for ``degree`` times ``pp`` ranks, and what there is to say of them.

    Args:
        costs: seconds of each of ``work.nodes``, forward and backward.
        pp: ranks that each tower has, with ``chunks`` of its stages on each.

    Raises:
        Refused: there are none, fewer than ``degree``, or none that are worth it; or one has fewer units than stages.
    """
    shape = Shape(degree, pp, chunks)
    finder = _Finder(work, costs, shape, counts_messages=True)
    pieces, notes = finder.pieces(), tuple[str, ...]()
    if finder.lacks(pieces):
        finder = _Finder(work, costs, shape, counts_messages=False)
        pieces = finder.pieces()
        if why := finder.lacks(pieces):
            ranks = f"{degree} ranks" if pp == 1 else f"{degree} times {pp} ranks"
            raise Refused(f"plan: branch={degree} finds no towers for {ranks}: {why}")
        notes = (
            f"branch={degree}: at this size sending what passes between the towers takes longer, by measurement, than "
            "they save",
        )
    return assigned(work, costs, finder.groups(pieces), shape), notes


class _Finder:
    """A graph in units that can't be parted, in an order in which they can run.

    Args:
        counts_messages: what is sent has its price in time; else any towers will do.
    """

    def __init__(self, work: Work, costs: Sequence[float], shape: Shape, counts_messages: bool) -> None:
        self._work, self._costs, self._shape, self._counts = work, costs, shape, counts_messages
        self._degree = shape.branch
        self._total = sum(costs)
        self._place = {node: at for at, node in enumerate(work.nodes)}
        edges = [0, *work.edges, len(work.nodes)]
        self._spans = list(pairwise(edges))  # of each unit, its places
        self._nodes = [work.nodes[first:last] for first, last in self._spans]
        unit = {node: at for at, nodes in enumerate(self._nodes) for node in nodes}
        self._before: list[int] = []  # of each unit, as bits, all that it needs; itself too
        self._beside: list[set[int]] = [set() for _ in self._nodes]  # those that it shares an edge with
        for at, nodes in enumerate(self._nodes):
            mask = 1 << at
            for source in {unit[s] for n in nodes for s in n.all_input_nodes if s in unit and unit[s] != at}:
                mask |= self._before[source]
                self._beside[at].add(source)
                self._beside[source].add(at)
            self._before.append(mask)
        self._after = [1 << at for at in range(len(self._nodes))]  # likewise all that need it
        for at in reversed(range(len(self._nodes))):
            for other in self._beside[at]:
                if other < at:
                    self._after[other] |= self._after[at]
        self.most: list[_Tower] = []  # the most towers side by side that were seen
        self.by_turns = ""
        self._known: dict[tuple[int, ...], list[_Piece]] = {}

    # ---- finding

    def pieces(self) -> list[_Piece]:
        """The whole model, in order."""
        return self._cut(tuple(range(len(self._nodes))))

    def _cut(self, units: tuple[int, ...], depth: int = 0) -> list[_Piece]:
        """What lies between two waists, or in a tower; what lies deeper than anybody builds stays together."""
        if units not in self._known:
            self._known[units] = self._look(units, depth)
        return self._known[units]

    def _look(self, units: tuple[int, ...], depth: int) -> list[_Piece]:
        found: list[_Piece] = []
        while units:
            if (depth := depth + 1) > DEEPEST:
                return [*found, _Piece(units)]
            parted = self._components(units)
            if len(parted) == 1 and (waists := self._waists(units)):
                return [*found, *self._between(units, waists, depth)]
            begun, tail = self._by_source(units)
            if len(parted) > 1:
                inside = self._chosen(parted, depth)
                joined = [*self._chosen(begun, depth), *self._cut(tail, depth)] if tail else []
                return [*found, *(joined if self._worth(joined) > self._worth(inside) else inside)]
            if len(begun) == 1 and not tail:
                return [*found, _Piece(units)]
            found += self._chosen(begun, depth)
            units = tail
        return found

    def _between(self, units: tuple[int, ...], waists: set[int], depth: int) -> Iterator[_Piece]:
        region: list[int] = []
        for unit in units:
            if unit in waists:
                yield from self._cut(tuple(region), depth)
                yield _Piece((unit,))
                region = []
            else:
                region.append(unit)
        yield from self._cut(tuple(region), depth)

    def _chosen(self, towers: Sequence[_Tower], depth: int) -> list[_Piece]:
        """The towers side by side, or one after the other with what lies side by side inside them."""
        inside = [piece for tower in towers for piece in self._cut(tower.units, depth)]
        if len(towers) == 1:
            return inside
        apart = self._side_by_side(towers)
        return [apart] if self._worth([apart]) > self._worth(inside) else inside

    def _waists(self, units: tuple[int, ...]) -> set[int]:
        """Those that come before or after each of the others."""
        every = sum(1 << unit for unit in units)
        return {u for u in units if ((self._before[u] | self._after[u]) & every) == every}

    def _components(self, units: tuple[int, ...]) -> list[_Tower]:
        """What hangs together."""
        left, found = set(units), []
        for unit in units:
            if unit not in left:
                continue
            left.discard(unit)
            own, ahead = [], [unit]
            while ahead:
                own.append(one := ahead.pop())
                near = self._beside[one] & left
                left -= near
                ahead += near
            found.append(sorted(own))
        return self._towers(found)

    def _by_source(self, units: tuple[int, ...]) -> tuple[list[_Tower], tuple[int, ...]]:
        """Of what begins at several places: what comes of one of these alone, and the rest, which joins them."""
        every = sum(1 << unit for unit in units)
        sources = sum(1 << unit for unit in units if (self._before[unit] & every) == 1 << unit)
        own: dict[int, list[int]] = {}
        tail: list[int] = []
        for unit in units:
            mine = self._before[unit] & sources
            (own.setdefault(mine, []) if mine.bit_count() == 1 else tail).append(unit)
        until = min(self._draws(tail), default=len(self._work.nodes))
        late = [unit for found in own.values() for unit in found if max(self._draws([unit]), default=-1) > until]
        joined = sum(1 << unit for unit in tail)
        for unit in late:  # what draws random numbers after the rest has begun to, and all that needs it
            joined |= self._after[unit] & every
        kept = [[unit for unit in found if not joined >> unit & 1] for found in own.values()]
        return self._towers([found for found in kept if found]), tuple(unit for unit in units if joined >> unit & 1)

    def _towers(self, found: Sequence[list[int]]) -> list[_Tower]:
        """In the order in which they draw random numbers, or else come first."""
        towers = [self._tower(own) for own in self._by_turns(found)]
        towers.sort(key=lambda tower: self._first_draw(tower.units))
        large = [t for t in towers if t.seconds >= LEAST_TOWER * self._total and not self._idle(t)]
        if len(large) > len(self.most):
            self.most = large
        return towers

    def _by_turns(self, found: Sequence[list[int]]) -> list[list[int]]:
        """Those that draw random numbers by turns stay together: the generator passes from each to the next once."""
        drawing = sorted((draws[0], draws[-1], own) for own in found if (draws := self._draws(own)))
        joined = [own for own in found if not self._draws(own)]
        until = -1
        for first, last, own in drawing:
            if first < until:
                self.by_turns = self.by_turns or f"{self._name(joined[-1])} and {self._name(own)}"
                joined[-1] = sorted([*joined[-1], *own])
            else:
                joined.append(own)
            until = max(until, last)
        return joined

    def _side_by_side(self, towers: Sequence[_Tower]) -> _Piece:
        """A rank for each tower; what is small, or takes less time than its messages, has the last one's."""
        small = [t for t in towers if t.seconds < max(LEAST_TOWER * self._total, t.sends) or self._idle(t)]
        last = self._degree - 1
        loads = [0.0] * self._degree
        ranks = {id(tower): last for tower in small}
        for tower in sorted(towers, key=lambda each: -each.seconds):
            if id(tower) not in ranks:
                rank = min(range(self._degree), key=lambda one: (loads[one], -one))
                ranks[id(tower)] = rank
                loads[rank] += tower.seconds
        sends = sum(tower.sends for tower in towers if ranks[id(tower)] != last)
        saved = sum(loads) - max(loads)
        return _Piece((), tuple((tower, ranks[id(tower)]) for tower in towers), saved, sends)

    def _idle(self, tower: _Tower) -> bool:
        """Whether it only keeps count, as batch norms do of their batches."""
        return all(writes(node) for unit in tower.units for node in self._nodes[unit])

    @staticmethod
    def _worth(pieces: Iterable[_Piece]) -> float:
        return max(0.0, sum(piece.saved - piece.sends for piece in pieces))

    def _tower(self, units: Collection[int]) -> _Tower:
        seconds = sum(self._costs[place] for unit in units for place in range(*self._spans[unit]))
        return _Tower(tuple(units), seconds, self._sends(units) if self._counts else 0.0)

    def _sends(self, units: Collection[int]) -> float:
        """Seconds for what passes in and out, there and its gradient back, and for the sums of shared gradients."""
        inside = {node for unit in units for node in self._nodes[unit]}
        coming = {source for node in inside for source in node.all_input_nodes if source in self._place} - inside
        going = {node for node in inside if any(user not in inside for user in node.users)}
        ways = sum((num_bytes_of(one) + MESSAGE_BYTES) * (1 + (one in self._work.carries)) for one in coming | going)
        shared = {p for node in inside for p in self._work.parameters(node) if self._users[p] - inside}
        return (ways + sum(num_bytes_of(one) + MESSAGE_BYTES for one in shared)) / BYTES_PER_SECOND

    @cached_property
    def _users(self) -> dict[fx.Node, set[fx.Node]]:
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self._work.nodes:
            for parameter in self._work.parameters(node):
                found.setdefault(parameter, set()).add(node)
        return found

    def _draws(self, units: Collection[int]) -> list[int]:
        """The places at which random numbers are drawn."""
        return [self._place[node] for unit in units for node in self._nodes[unit] if draws_in(node)]

    def _first_draw(self, units: Sequence[int]) -> int:
        return min(self._draws(units), default=self._spans[units[0]][0])

    # ---- telling

    def lacks(self, pieces: Sequence[_Piece]) -> str:
        """Why the pieces are no plan; empty where they are one."""
        saved = sum(piece.saved for piece in pieces)
        ranks = {rank for piece in pieces for _, rank in piece.towers}
        if len(ranks) == self._degree and saved >= LEAST_SAVED * self._total and self._total:
            return ""
        alone = self._degree * self._shape.pp
        pp = f",pp={self._shape.pp}" if self._shape.pp > 1 else ""
        beside = ", ".join(f"{self._name(t.units)} {t.seconds / self._total:.0%}" for t in self.most)
        if len(self.most) < 2:
            turns = self.by_turns and f"{self.by_turns} draw random numbers by turns, so they run on one rank"
            return f"{turns or 'everything depends on what comes before it'}; use pp={alone}"
        if len(self.most) < self._degree:
            count = len(self.most)
            return f"no more than {count} lie side by side ({beside} of the time); use branch={count}{pp}"
        share = f"{saved / self._total:.1%}, which is less than {LEAST_SAVED:.0%}"
        return f"those that lie side by side ({beside} of the time) would save {share}; use pp={alone}"

    def _name(self, units: Iterable[int]) -> str:
        return shared_module(node for unit in units for node in self._nodes[unit])

    def groups(self, pieces: Sequence[_Piece]) -> list[Group]:
        """The pieces, each rank's towers in one group; what is common in a row is one as well."""
        lane = self._lanes(pieces)
        found: list[Group] = []
        for piece in pieces:
            if piece.towers:
                found += [Group(self._spans_of(units), lane[rank]) for units, rank in self._groups(piece)]
            elif piece.common and found and found[-1].lane is None:
                found[-1] = Group((*found[-1].spans, *self._spans_of(piece.common)))
            elif piece.common:
                found.append(Group(self._spans_of(piece.common)))
        return found

    def _lanes(self, pieces: Sequence[_Piece]) -> list[int]:
        """Of each rank's towers the lane. Cut into stages, the shortest have the last one, where the head comes too."""
        loads = [0.0] * self._degree
        for tower, rank in (one for piece in pieces for one in piece.towers):
            loads[rank] += tower.seconds
        order = sorted(range(self._degree), key=lambda rank: -loads[rank] if self._shape.pp > 1 else 0.0)
        return [order.index(rank) for rank in range(self._degree)]

    def _spans_of(self, units: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple(self._spans[unit] for unit in units)

    def _groups(self, piece: _Piece) -> Iterator[tuple[tuple[int, ...], int]]:
        """A rank's towers are one stage; of several that draw random numbers each is one, to take its turn."""
        each = [(tower.units, rank) for tower, rank in piece.towers]
        drawing = [one for one in each if self._draws(one[0])]
        turns = drawing if len(drawing) > 1 else []
        rest = [one for one in each if one not in turns]
        for rank in sorted({rank for _, rank in rest}):
            yield tuple(unit for units, at in rest if at == rank for unit in units), rank
        yield from turns
