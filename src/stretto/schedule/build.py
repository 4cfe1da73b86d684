"""The schedules by name. One generator makes them all; a schedule is the rules that it follows.

The generator plays the pipeline in unit time (forward 1, backward 2, or 1 + 1 where it is split): whenever a rank is
free, it takes the action that comes first among those that can run now, a forward before all else, within the limits
that make the schedule. So any graph of stages, any number of microbatches and unequal numbers of stages a rank come out
as lists that can run, for they just have. Each stage takes its microbatches in their order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stretto.errors import PlanError, nearest
from stretto.schedule.action import Action, Flow, Kind, Schedule
from stretto.schedule.check import check_schedule

SPLIT_UNITS: Final = MappingProxyType({Kind.FORWARD: 1, Kind.INPUT: 1, Kind.WEIGHT: 1})
WHOLE_UNITS: Final = MappingProxyType({Kind.FORWARD: 1, Kind.BACKWARD: 2})


class _Board:
    """How far the play has come: what has ended when, and how many of each kind each stage has begun."""

    def __init__(self, flow: Flow, num_microbatches: int, units: Mapping[Kind, int]) -> None:
        self.flow = flow
        self.num_microbatches = num_microbatches
        self.units = units
        self.ends: dict[Action, int] = {}
        self.begun = {kind: [0] * len(flow.ranks) for kind in units}
        self.gradient = Kind.INPUT if Kind.INPUT in units else Kind.BACKWARD
        self._next: dict[tuple[Kind, int], tuple[Action, tuple[Action, ...]]] = {}  # with what it needs

    def ready(self, rank: int, time: int) -> list[Action]:
        """What ``rank`` could run at ``time``: of each stage and kind the next one, if what it needs has ended."""
        found = []
        for stage in self.flow.stages_of[rank]:
            for kind, begun in self.begun.items():
                if begun[stage] < self.num_microbatches:
                    action, needs = self._next.get((kind, stage)) or self._look(kind, stage)
                    if all(self.ends.get(need, time + 1) <= time for need in needs):
                        found.append(action)
        return found

    def _look(self, kind: Kind, stage: int) -> tuple[Action, tuple[Action, ...]]:
        action = Action(kind, stage, self.begun[kind][stage])
        self._next[kind, stage] = action, self.flow.needs(action, lambda stage, microbatch: self.gradient)
        return self._next[kind, stage]

    def start(self, action: Action, time: int) -> int:
        """Runs ``action`` and returns its end."""
        self.begun[action.kind][action.stage] += 1
        self._next.pop((action.kind, action.stage), None)
        self.ends[action] = time + self.units[action.kind]
        return self.ends[action]

    def open(self, stage: int, until: Kind) -> int:
        """Microbatches whose forward has run at ``stage`` and whose ``until`` has not."""
        return self.begun[Kind.FORWARD][stage] - self.begun[until][stage]


def _oldest_first(action: Action) -> tuple[int, ...]:
    """Forwards before backwards before WEIGHT; of these the oldest microbatch, of that the earliest stage.

    A rank that took a backward first, where both can run, would let the ranks after it wait for the forward: with
    zero-bubble and interleaved that costs a bubble that theory doesn't have.
    """
    return (tuple(Kind).index(action.kind), action.microbatch, action.stage)


@dataclass(frozen=True)
class _Rules:
    """What makes a schedule: the kinds it knows, what it holds back, and what comes first of the rest."""

    units: Mapping[Kind, int]
    allows: Callable[[_Board, Action], bool]
    order: Callable[[Action], tuple[int, ...]] = _oldest_first  # the least is taken


def _play(name: str, flow: Flow, num_microbatches: int, rules: _Rules) -> Schedule:
    board = _Board(flow, num_microbatches, rules.units)
    lists: list[list[Action]] = [[] for _ in range(flow.num_ranks)]
    free = [0] * flow.num_ranks
    time, total = 0, len(rules.units) * len(flow.ranks) * num_microbatches

    def run(action: Action) -> None:
        rank = flow.ranks[action.stage]
        lists[rank].append(action)
        free[rank] = board.start(action, time)

    while sum(map(len, lists)) < total:
        for rank in range(flow.num_ranks):
            ready = board.ready(rank, time) if free[rank] <= time else []
            if allowed := [action for action in ready if rules.allows(board, action)]:
                run(min(allowed, key=rules.order))
        working = [end for end in free if end > time]
        if working:
            time = min(working)
        else:  # the limits hold every rank back: the first of all that could run goes over its own
            run(min((action for rank in range(flow.num_ranks) for action in board.ready(rank, time)), key=rules.order))
    return Schedule(name, flow, num_microbatches, tuple(map(tuple, lists)))


def _hops(flow: Flow) -> list[int]:
    """For each stage, on how many ranks in turn a microbatch is from there to the end, at most; its own counts."""
    hops = [1] * len(flow.ranks)
    for producer, consumer in sorted(flow.feeds, reverse=True):  # a stage's consumers are done before it is
        far = hops[consumer] + (flow.ranks[producer] != flow.ranks[consumer])
        hops[producer] = max(hops[producer], far)
    return hops


def gpipe(flow: Flow, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965, section 2.3)."""

    def allows(board: _Board, action: Action) -> bool:
        begun = board.begun[Kind.FORWARD]
        held = flow.stages_of[flow.ranks[action.stage]]
        return action.kind is Kind.FORWARD or all(begun[stage] == num_microbatches for stage in held)

    return _play("gpipe", flow, num_microbatches, _Rules(WHOLE_UNITS, allows))


def one_forward_one_backward(flow: Flow, num_microbatches: int) -> Schedule:
    """No more forwards ahead than keep the ranks after this one busy, then a backward for each forward
    (PipeDream-flush, arXiv 2104.04473, section 2.2)."""
    hops = _hops(flow)

    def allows(board: _Board, action: Action) -> bool:
        return action.kind is Kind.BACKWARD or board.open(action.stage, Kind.BACKWARD) < hops[action.stage]

    return _play("1f1b", flow, num_microbatches, _Rules(WHOLE_UNITS, allows))


def interleaved(flow: Flow, num_microbatches: int) -> Schedule:
    """1f1b with several stages a rank: each takes as many microbatches in a row as there are ranks, then the next
    stage does (arXiv 2104.04473, section 2.2). The bubble shrinks by the stages a rank; messages and memory grow.

    Raises:
        PlanError: no rank holds two stages.
    """
    if max(map(len, flow.stages_of)) < 2:
        raise PlanError("schedule interleaved needs a rank with at least 2 stages, got 1 a rank; use 1f1b for that")
    hops, degree = _hops(flow), flow.num_ranks

    def round_first(action: Action) -> tuple[int, ...]:
        turn, place = divmod(action.microbatch, degree)
        forward = action.kind is Kind.FORWARD
        return (not forward, turn, action.stage if forward else -action.stage, place)

    def ahead(held: tuple[int, ...]) -> int:
        """Megatron-LM's number: the forwards up to the last stage's first one, and two for each rank after it."""
        return (len(held) - 1) * min(degree, num_microbatches) + 2 * hops[held[-1]] - 1 if held else 0

    limits = [ahead(held) for held in flow.stages_of]

    def allows(board: _Board, action: Action) -> bool:
        if action.kind is Kind.BACKWARD:
            return True
        rank = flow.ranks[action.stage]
        held, begun = flow.stages_of[rank], board.begun[Kind.FORWARD]
        left = [Action(Kind.FORWARD, stage, begun[stage]) for stage in held if begun[stage] < num_microbatches]
        room = sum(board.open(stage, Kind.BACKWARD) for stage in held) < limits[rank]
        return room and action == min(left, key=round_first)  # no later forward instead of one that isn't there yet

    return _play("interleaved", flow, num_microbatches, _Rules(WHOLE_UNITS, allows, round_first))


def zero_bubble(flow: Flow, num_microbatches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2.2): 1f1b whose weights' gradients wait until the rank would be idle, or
    until it keeps as many microbatches as the first rank of 1f1b does."""
    hops = _hops(flow)

    def allows(board: _Board, action: Action) -> bool:
        few = board.open(action.stage, Kind.INPUT) < hops[action.stage]
        oldest = min(board.begun[Kind.WEIGHT][stage] for stage in flow.stages_of[flow.ranks[action.stage]])
        return action.kind is not Kind.FORWARD or (few and action.microbatch - oldest < max(hops))

    return _play("zero-bubble", flow, num_microbatches, _Rules(SPLIT_UNITS, allows))


SCHEDULES: Final[Mapping[str, Callable[[Flow, int], Schedule]]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
    }
)


def build_schedule(name: str, flow: Flow, num_microbatches: int) -> Schedule:
    """The schedule of that name, checked.

    Raises:
        PlanError: an unknown name (the nearest is offered), fewer than one microbatch, a rank without a stage, or a
            flow that the schedule has no use for.
    """
    if name not in SCHEDULES:
        raise PlanError(f"unknown schedule {name!r}; valid: {', '.join(SCHEDULES)}{nearest(name, SCHEDULES)}")
    if num_microbatches < 1:
        raise PlanError(f"schedule {name}: microbatches must be at least 1, got {num_microbatches}")
    schedule = SCHEDULES[name](flow, num_microbatches)
    check_schedule(schedule)
    return schedule
