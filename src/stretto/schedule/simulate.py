"""How long a schedule takes, by arithmetic: each action starts when its rank is free and what it needs has arrived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.errors import PlanError
from stretto.schedule.action import Action, Kind, Schedule
from stretto.schedule.check import check_schedule, running_order


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs.

    Args:
        forward: seconds of each stage's forward.
        backward: seconds of each stage's whole backward.
        weight: for each stage, the share of ``backward`` that is WEIGHT where it is split, from 0 to 1.
        send: seconds of a message between two ranks. It keeps neither of them busy.

    Raises:
        PlanError: numbers of stages that differ, a negative time, or a share outside of 0 to 1.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0

    def __post_init__(self) -> None:
        numbers = (len(self.forward), len(self.backward), len(self.weight))
        if len(set(numbers)) != 1:
            raise PlanError(f"costs: expected one forward, backward and weight for each stage, got {numbers} of them")
        if min((*self.forward, *self.backward, self.send), default=0) < 0:
            raise PlanError(f"costs: no time is negative, got {self}")
        if not all(0 <= share <= 1 for share in self.weight):
            raise PlanError(f"costs: weight is a share of backward, from 0 to 1; got {self.weight}")

    def seconds(self, action: Action) -> float:
        """The time of ``action``."""
        if action.kind is Kind.FORWARD:
            return self.forward[action.stage]
        weight = self.weight[action.stage]
        share = {Kind.BACKWARD: 1.0, Kind.INPUT: 1 - weight, Kind.WEIGHT: weight}[action.kind]
        return self.backward[action.stage] * share


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank did from ``start`` to ``end`` (seconds), planned or measured.

    ``what`` is a :class:`Kind`, or another word: ``send``, ``receive``, ``reduce``, ``idle``.
    """

    rank: int
    what: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        """``F2.0`` for work on a microbatch, as :class:`Action` writes it; else the word alone."""
        if self.stage is None or self.microbatch is None:
            return str(self.what)
        space = "" if len(self.what) == 1 else " "
        return f"{self.what}{space}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline in time. All tuples but ``spans`` have one entry a rank."""

    spans: tuple[Span, ...]
    seconds: float
    busy: tuple[float, ...]  # seconds at work
    bubble: float  # the share of all ranks' time in which they wait
    in_flight: tuple[int, ...]  # most microbatches at once whose forward the rank still keeps for a backward


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The schedule's timeline where every action starts as early as it can.

    Raises:
        PlanError: the schedule can't run (see :func:`check_schedule`), or the costs are of another number of stages.
    """
    check_schedule(schedule)
    ranks = schedule.flow.ranks
    if len(costs.forward) != len(ranks):
        raise PlanError(f"costs: expected {len(ranks)} stage(s), as the schedule has, got {len(costs.forward)}")
    free = [0.0] * schedule.flow.num_ranks
    busy = [0.0] * schedule.flow.num_ranks
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    for rank, action in running_order(schedule):
        came = [ends[need] + costs.send * (ranks[need.stage] != rank) for need in schedule.needs(action)]
        start = max(free[rank], *came, 0.0)
        free[rank] = ends[action] = start + costs.seconds(action)
        busy[rank] += costs.seconds(action)
        spans.append(Span(rank, action.kind, start, free[rank], action.stage, action.microbatch))
    seconds = max(free)
    bubble = 1 - sum(busy) / (len(busy) * seconds) if seconds else 0.0
    most = tuple(_most_kept(actions) for actions in schedule.actions)
    return Timeline(tuple(spans), seconds, tuple(busy), bubble, most)


def _most_kept(actions: Iterable[Action]) -> int:
    """The most microbatches between the first of a rank's forwards of it and the last backward action of it."""
    open_stages: dict[int, int] = {}
    most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            open_stages[action.microbatch] = open_stages.get(action.microbatch, 0) + 1
        elif action.kind is not Kind.INPUT:  # WEIGHT still needs what forward kept
            open_stages[action.microbatch] -= 1
            if not open_stages[action.microbatch]:
                del open_stages[action.microbatch]
        most = max(most, len(open_stages))
    return most
