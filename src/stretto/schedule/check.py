"""Whether a schedule can run: everything once, in an order that every rank can keep, without a wait that never ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stretto.errors import PlanError
from stretto.schedule.action import Action, Kind, Schedule


def check_schedule(schedule: Schedule) -> None:
    """Checks that every gradient is made, once, and that no rank waits for ever.

    Raises:
        PlanError: a rank without actions; an action missing, twice, of another rank or of no stage or microbatch; one
            before what it needs on its own rank; or ranks that wait for each other, which are named.
    """
    try:
        _check_places(schedule)
        _check_complete(schedule)
        _check_own_order(schedule)
    except PlanError as error:
        raise PlanError(f"schedule {schedule.name}: {error}") from None
    for _ in running_order(schedule):
        pass


def running_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action) in an order in which all ranks could have run them; sends don't block, receives do.

    Raises:
        PlanError: ranks wait for each other, or for what no rank runs.
    """
    done: set[Action] = set()
    at = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions) and done.issuperset(schedule.needs(actions[at[rank]])):
                action = actions[at[rank]]
                yield rank, action
                done.add(action)
                at[rank] += 1
                moved = True
    waits = {
        rank: (actions[place], next(need for need in schedule.needs(actions[place]) if need not in done))
        for rank, (actions, place) in enumerate(zip(schedule.actions, at, strict=True))
        if place < len(actions)
    }
    if waits:
        raise PlanError(f"schedule {schedule.name}: a wait that never ends: {_circle(schedule, waits)}")


def _circle(schedule: Schedule, waits: dict[int, tuple[Action, Action]]) -> str:
    """Who waits for whom, from one rank around to the same rank."""
    rank, path = min(waits), list[int]()
    while rank in waits and rank not in path:
        path.append(rank)
        rank = schedule.flow.ranks[waits[rank][1].stage]
    circle = path[path.index(rank) :] if rank in path else path
    said = [
        f"rank {rank} can't run {waits[rank][0]} before {waits[rank][1]}"
        f" of rank {schedule.flow.ranks[waits[rank][1].stage]}"
        for rank in circle
    ]
    return f"{', '.join(said)}; move what another rank waits for before what waits itself"


def _check_places(schedule: Schedule) -> None:
    flow, count = schedule.flow, schedule.num_microbatches
    if len(schedule.actions) != flow.num_ranks:
        raise PlanError(f"its stages are on {flow.num_ranks} rank(s), its actions on {len(schedule.actions)}")
    for rank, actions in enumerate(schedule.actions):
        if not actions:
            raise PlanError(f"rank {rank} has nothing to do; give it a stage, or use fewer ranks")
        for action in actions:
            if not (0 <= action.stage < len(flow.ranks) and 0 <= action.microbatch < count):
                there = f"{len(flow.ranks)} stage(s) and {count} microbatch(es)"
                raise PlanError(f"rank {rank} has {action}, but there are {there}, counted from 0")
            if flow.ranks[action.stage] != rank:
                said = f"rank {rank} has {action}, but stage {action.stage} is on rank {flow.ranks[action.stage]}"
                raise PlanError(f"{said}; move it there")


def _check_complete(schedule: Schedule) -> None:
    times = Counter(action for actions in schedule.actions for action in actions)
    for action, number in times.items():
        if number > 1:
            raise PlanError(f"{action} is there {number} times; leave it once")
    for stage, rank in enumerate(schedule.flow.ranks):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, inputs, weight = (Action(kind, stage, microbatch) for kind in Kind)
            if forward not in times:
                raise PlanError(f"{forward} is missing on rank {rank}")
            if whole in times and (inputs in times or weight in times):
                both = inputs if inputs in times else weight
                raise PlanError(f"rank {rank} has {whole} and {both}; a backward is whole ({whole}) or split, not both")
            if whole not in times and (inputs not in times or weight not in times):
                absent = f"{weight if inputs in times else inputs}"
                either = absent if inputs in times or weight in times else f"{whole} (or {inputs} and {weight})"
                raise PlanError(f"{either} is missing on rank {rank}, so a gradient would not be made")


def _check_own_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        place = {action: at for at, action in enumerate(actions)}
        for action in actions:
            for need in schedule.needs(action):
                if place.get(need, -1) > place[action]:
                    raise PlanError(f"rank {rank} has {action} before {need}, which it needs; swap them")
