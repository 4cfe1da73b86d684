"""Pipeline schedules: any graph of stages gives lists that can run, with the memory and the bubble of the papers.

``runs_through`` and ``kept`` are the tests' own: what a schedule does is not asked of the code that checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Flow,
    Kind,
    Schedule,
    Timeline,
    build_schedule,
    check_schedule,
    simulate,
)

FORWARD, BACKWARD, INPUT, WEIGHT = Kind
many = settings(max_examples=100, deadline=None)


def act(text: str) -> Action:
    stage, microbatch = text[1:].split(".")
    return Action(Kind(text[0]), int(stage), int(microbatch))


def by_hand(flow: Flow, num_microbatches: int, *ranks: str) -> Schedule:
    return Schedule("mine", flow, num_microbatches, tuple(tuple(map(act, rank.split())) for rank in ranks))


def even(flow: Flow, forward: float = 1.0, backward: float = 2.0, weight: float = 0.5, send: float = 0.0) -> Costs:
    stages = len(flow.ranks)
    return Costs((forward,) * stages, (backward,) * stages, (weight,) * stages, send)


def timed(name: str, flow: Flow, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    return simulate(build_schedule(name, flow, num_microbatches), costs or even(flow))


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Any acyclic graph of up to 8 stages on up to 4 ranks, each with at least one stage, in any order."""
    degree = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, degree - 1), max_size=4))
    ranks = draw(st.permutations([*range(degree), *more]))
    pairs = [(a, b) for b in range(len(ranks)) for a in range(b)]
    feeds = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=10)) if pairs else []
    return Flow(tuple(ranks), tuple(feeds))


def usable(name: str, flow: Flow) -> bool:
    return name != "interleaved" or max(flow.ranks.count(rank) for rank in flow.ranks) > 1


def runs_through(schedule: Schedule) -> bool:
    """Whether every rank comes to the end of its list, if each waits for what its next action needs."""
    todo = [list(actions) for actions in schedule.actions]
    seen: set[tuple[str, int, int]] = set()  # the halves of a backward are both "made" by a whole one

    def can(action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is FORWARD:
            return all(("F", p, microbatch) in seen for p, c in schedule.flow.feeds if c == stage)
        if action.kind is WEIGHT:
            return ("I", stage, microbatch) in seen
        fed = [c for p, c in schedule.flow.feeds if p == stage]
        return ("F", stage, microbatch) in seen and all(("I", c, microbatch) in seen for c in fed)

    while movable := [rank for rank in todo if rank and can(rank[0])]:
        done = movable[0].pop(0)
        seen |= {(kind, done.stage, done.microbatch) for kind in ("IW" if done.kind is BACKWARD else done.kind)}
    return not any(todo)


def kept(actions: tuple[Action, ...], last: tuple[Kind, ...] = (BACKWARD, WEIGHT)) -> int:
    """The most forwards of one rank at once whose ``last`` action is still to come."""
    opened = [sum((a.kind is FORWARD) - (a.kind in last) for a in actions[: n + 1]) for n in range(len(actions))]
    return max(opened)


# ---------------------------------------------------------------------------------- any flow, any schedule


@pytest.mark.parametrize("name", SCHEDULES)
@many
@given(flow=flows(), num_microbatches=st.integers(1, 7))
def test_any_flow_gives_lists_that_run(name: str, flow: Flow, num_microbatches: int) -> None:
    if not usable(name, flow):
        with pytest.raises(PlanError, match="at least 2 stages"):
            build_schedule(name, flow, num_microbatches)
        return
    schedule = build_schedule(name, flow, num_microbatches)
    kinds = (FORWARD, INPUT, WEIGHT) if name == "zero-bubble" else (FORWARD, BACKWARD)
    for rank, actions in enumerate(schedule.actions):
        held = [stage for stage, its in enumerate(flow.ranks) if its == rank]
        wanted = [Action(*one) for one in product(kinds, held, range(num_microbatches))]
        assert sorted(map(str, actions)) == sorted(map(str, wanted))
        for kind, stage in product(kinds, held):
            order = [a.microbatch for a in actions if (a.kind, a.stage) == (kind, stage)]
            assert order == sorted(order)
    assert runs_through(schedule)
    check_schedule(schedule)


@many
@given(flow=flows(), num_microbatches=st.integers(1, 7))
def test_1f1b_never_keeps_more_than_gpipe(flow: Flow, num_microbatches: int) -> None:
    less = build_schedule("1f1b", flow, num_microbatches).actions
    more = build_schedule("gpipe", flow, num_microbatches).actions
    assert all(kept(a) <= kept(b) for a, b in zip(less, more, strict=True))


@many
@given(flow=flows(), num_microbatches=st.integers(1, 4), data=st.data())
def test_the_check_finds_just_what_cannot_run(flow: Flow, num_microbatches: int, data: st.DataObject) -> None:
    """Lists in any order at all, and lists with two actions exchanged."""
    good = build_schedule(data.draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"])), flow, num_microbatches)
    rank = data.draw(st.integers(0, flow.num_ranks - 1))
    lists = list(good.actions)
    if data.draw(st.booleans()):
        lists[rank] = tuple(data.draw(st.permutations(lists[rank])))
    else:
        places = st.integers(0, len(lists[rank]) - 1)
        a, b, mine = data.draw(places), data.draw(places), list(lists[rank])
        mine[a], mine[b] = mine[b], mine[a]
        lists[rank] = tuple(mine)
    schedule = dataclasses.replace(good, actions=tuple(lists))
    try:
        check_schedule(schedule)
    except PlanError:
        assert not runs_through(schedule)
    else:
        assert runs_through(schedule)


@many
@given(flow=flows(), num_microbatches=st.integers(1, 6), data=st.data())
def test_every_action_starts_as_early_as_it_can(flow: Flow, num_microbatches: int, data: st.DataObject) -> None:
    seconds = st.integers(0, 5)
    each = [tuple(float(data.draw(seconds)) for _ in flow.ranks) for _ in range(2)]
    costs = Costs(each[0], each[1], (0.25,) * len(flow.ranks), float(data.draw(seconds)))
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"]))
    schedule = build_schedule(name, flow, num_microbatches)
    line = simulate(schedule, costs)
    by_action = {str(span): span for span in line.spans}
    length = {"F": lambda s: costs.forward[s], "B": lambda s: costs.backward[s]}
    length |= {"I": lambda s: costs.backward[s] * 0.75, "W": lambda s: costs.backward[s] * 0.25}
    for rank, actions in enumerate(schedule.actions):
        free = 0.0
        for action in actions:
            span = by_action[str(action)]
            arrivals = [
                by_action[str(need)].end + (costs.send if flow.ranks[need.stage] != rank else 0.0)
                for need in schedule.needs(action)
            ]
            assert (span.rank, span.start) == (rank, max([free, *arrivals]))
            assert span.end - span.start == pytest.approx(length[span.what](action.stage))
            free = span.end
    assert line.seconds == max(span.end for span in line.spans)
    works = sum(span.end - span.start for span in line.spans)
    assert sum(line.busy) == pytest.approx(works)
    assert line.bubble == pytest.approx(1 - works / (flow.num_ranks * line.seconds) if line.seconds else 0)


# -------------------------------------------------------------------------------- the orders of the papers


def papers_1f1b(degree: int, rank: int, num_microbatches: int) -> list[str]:
    warm = min(degree - rank - 1, num_microbatches)
    found = [f"F{rank}.{m}" for m in range(warm)]
    for m in range(num_microbatches - warm):
        found += [f"F{rank}.{m + warm}", f"B{rank}.{m}"]
    return [*found, *(f"B{rank}.{m}" for m in range(num_microbatches - warm, num_microbatches))]


def megatrons_interleaved(degree: int, chunks: int, rank: int, num_microbatches: int) -> list[str]:
    """Megatron-LM's order; ``num_microbatches`` is a multiple of ``degree``."""
    stages = [rank + degree * chunk for chunk in range(chunks)]
    rounds = range(0, num_microbatches, degree)
    forwards = [f"F{s}.{r + m}" for r in rounds for s in stages for m in range(degree)]
    backwards = [f"B{s}.{r + m}" for r in rounds for s in reversed(stages) for m in range(degree)]
    total = len(forwards)
    warm = min(2 * (degree - rank - 1) + (chunks - 1) * degree, total)
    steady = [action for n in range(total - warm) for action in (forwards[warm + n], backwards[n])]
    return [*forwards[:warm], *steady, *backwards[total - warm :]]


GRID = [(degree, m) for degree in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 7, 8, 12)]


@pytest.mark.parametrize(("degree", "num_microbatches"), GRID)
def test_1f1b_is_the_papers(degree: int, num_microbatches: int) -> None:
    schedule = build_schedule("1f1b", Flow.chain(degree), num_microbatches)
    for rank, actions in enumerate(schedule.actions):
        assert list(map(str, actions)) == papers_1f1b(degree, rank, num_microbatches)
        assert kept(actions) == min(degree - rank, num_microbatches)


@pytest.mark.parametrize(("degree", "chunks", "rounds"), [*product((1, 2, 3, 4), (2, 3), (1, 2, 3))])
def test_interleaved_is_megatrons(degree: int, chunks: int, rounds: int) -> None:
    schedule = build_schedule("interleaved", Flow.chain(degree, chunks), degree * rounds)
    for rank, actions in enumerate(schedule.actions):
        assert list(map(str, actions)) == megatrons_interleaved(degree, chunks, rank, degree * rounds)


@pytest.mark.parametrize(("degree", "num_microbatches"), GRID)
def test_gpipe_runs_all_forwards_first(degree: int, num_microbatches: int) -> None:
    for actions in build_schedule("gpipe", Flow.chain(degree, chunks=2), num_microbatches).actions:
        half = 2 * num_microbatches
        assert [action.kind for action in actions] == [FORWARD] * half + [BACKWARD] * half


# ----------------------------------------------------------------------------- bubbles and memory in theory


@pytest.mark.parametrize(("degree", "num_microbatches"), GRID)
def test_bubbles_of_a_balanced_chain(degree: int, num_microbatches: int) -> None:
    flow, m, ahead = Flow.chain(degree), num_microbatches, degree - 1
    for forward, backward in ((1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (1.0, 3.5)):
        whole = (m + ahead) * (forward + backward)
        for name in ("gpipe", "1f1b"):
            line = timed(name, flow, m, even(flow, forward, backward))
            assert line.seconds == pytest.approx(whole)
            assert line.bubble == pytest.approx(ahead / (m + ahead))
    for forward, backward, weight in ((1.0, 2.0, 0.5), (1.0, 2.0, 0.4), (2.0, 3.0, 0.3), (1.0, 1.0, 0.5)):
        if m < degree:
            continue
        line = timed("zero-bubble", flow, m, even(flow, forward, backward, weight))
        waits = ahead * (forward + backward * (1 - weight) - backward * weight)
        assert line.seconds == pytest.approx(m * (forward + backward) + waits)
        lists = build_schedule("zero-bubble", flow, m).actions
        assert line.in_flight == tuple(map(kept, lists))
        assert max(line.in_flight) <= degree  # no more than the first rank of 1f1b


@pytest.mark.parametrize(("degree", "chunks", "rounds"), [*product((2, 3, 4), (2, 3), (1, 2, 3))])
def test_the_bubble_of_interleaved(degree: int, chunks: int, rounds: int) -> None:
    flow, m = Flow.chain(degree, chunks), degree * rounds
    for forward, backward in ((1.0, 2.0), (1.0, 1.0), (1.0, 3.5)):
        line = timed("interleaved", flow, m, even(flow, forward / chunks, backward / chunks))
        assert line.seconds == pytest.approx((m + (degree - 1) / chunks) * (forward + backward))


@pytest.mark.parametrize("num_microbatches", range(3, 14))
def test_interleaved_pays_for_any_number_of_microbatches(num_microbatches: int) -> None:
    flow = Flow.chain(3, chunks=2)
    inter = timed("interleaved", flow, num_microbatches, even(flow, 0.5, 1.0))
    assert inter.seconds < timed("1f1b", Flow.chain(3), num_microbatches).seconds


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_microbatch_is_one_layer_after_the_other(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    line = timed(name, Flow.chain(3, chunks), 1)
    forward = 3 * chunks
    assert line.seconds == forward + (2 * forward if name != "zero-bubble" else forward + 1)
    assert line.in_flight == (1, 1, 1)


def test_branches_run_beside_each_other_and_skips_cost_nothing() -> None:
    join = Flow((0, 1, 2), ((0, 2), (1, 2)))
    skip = Flow((0, 1, 2), ((0, 1), (1, 2), (0, 2)))
    for name in ("gpipe", "1f1b", "zero-bubble"):
        assert timed(name, join, 6).seconds == timed(name, Flow.chain(2), 6).seconds
        assert timed(name, skip, 6).seconds == timed(name, Flow.chain(3), 6).seconds
    assert timed("1f1b", join, 6).in_flight == (2, 2, 1)


def test_two_stages_in_a_row_on_one_rank_count_once() -> None:
    """Else a rank would keep more microbatches only because its work is cut finer."""
    fine = Flow((0, 0, 0, 1), ((0, 1), (1, 2), (2, 3)))
    assert timed("1f1b", fine, 6).in_flight == (2, 1)
    assert max(timed("zero-bubble", fine, 6).in_flight) == 2


def test_limits_that_would_stop_all_ranks_give_way() -> None:
    """Rank 1 takes four microbatches before its second stage does; rank 0, with one stage, would send but three."""
    flow = Flow((0, 1, 1, 2, 3), ((0, 1), (1, 2), (2, 3), (3, 4)))
    schedule = build_schedule("interleaved", flow, 8)
    assert runs_through(schedule)
    assert [str(action) for action in schedule.actions[0][:4]] == ["F0.0", "F0.1", "F0.2", "F0.3"]


def test_a_timeline_by_hand() -> None:
    flow = Flow.chain(2)
    split = by_hand(flow, 2, "F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")
    line = simulate(split, Costs((1.0, 3.0), (4.0, 6.0), (0.25, 0.5), send=0.5))
    told = {str(span): (span.rank, span.start, span.end) for span in line.spans}
    assert told == {
        "F0.0": (0, 0.0, 1.0),
        "F0.1": (0, 1.0, 2.0),
        "F1.0": (1, 1.5, 4.5),
        "B1.0": (1, 4.5, 10.5),
        "I0.0": (0, 11.0, 14.0),
        "W0.0": (0, 14.0, 15.0),
        "F1.1": (1, 10.5, 13.5),
        "B1.1": (1, 13.5, 19.5),
        "B0.1": (0, 20.0, 24.0),
    }
    assert (line.seconds, line.busy, line.in_flight) == (24.0, (10.0, 18.0), (2, 1))
    assert line.bubble == pytest.approx(1 - 28 / 48)


# --------------------------------------------------------------------------------------------- refusals

CHAIN = Flow.chain(2)
BAD: list[tuple[Callable[[], object], str]] = [
    (
        lambda: by_hand(CHAIN, 2, "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
        "schedule mine: a wait that never ends: rank 0 can't run B0.0 before B1.0 of rank 1, rank 1 can't run F1.1 "
        "before F0.1 of rank 0; move what another rank waits for before what waits itself",
    ),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", ""), "schedule mine: rank 1 has nothing to do"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0"), "its stages are on 2 rank(s), its actions on 1"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "B1.0"), "F1.0 is missing on rank 1"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "F1.0"), "B1.0 (or I1.0 and W1.0) is missing on rank 1"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "F1.0 I1.0"), "mine: W1.0 is missing on rank 1"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "F1.0 W1.0"), "mine: I1.0 is missing on rank 1"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0 F0.0", "F1.0 B1.0"), "F0.0 is there 2 times; leave it once"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "F1.0 B1.0 W1.0"), "rank 1 has B1.0 and W1.0"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0 F1.0", "B1.0"), "rank 0 has F1.0, but stage 1 is on rank 1; move it there"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0 F0.1", "F1.0 B1.0"), "rank 0 has F0.1, but there are 2 stage(s) and 1"),
    (lambda: by_hand(CHAIN, 1, "B0.0 F0.0", "F1.0 B1.0"), "rank 0 has B0.0 before F0.0, which it needs; swap them"),
    (lambda: by_hand(CHAIN, 1, "F0.0 B0.0", "F1.0 W1.0 I1.0"), "rank 1 has W1.0 before I1.0, which it needs"),
    (
        lambda: build_schedule("1f1", CHAIN, 2),
        "unknown schedule '1f1'; valid: gpipe, 1f1b, interleaved, zero-bubble; did you mean '1f1b'?",
    ),
    (lambda: build_schedule("gpipe", CHAIN, 0), "microbatches must be at least 1, got 0"),
    (lambda: build_schedule("gpipe", Flow((0, 2), ((0, 1),)), 2), "rank 1 has nothing to do"),
    (lambda: build_schedule("interleaved", CHAIN, 2), "needs a rank with at least 2 stages"),
    (lambda: Flow((0, 1), ((1, 0),)), "a feed leads from a stage to a later one of the 2, got (1, 0)"),
    (lambda: Flow((0, 1), ((0, 2),)), "a feed leads from a stage to a later one of the 2, got (0, 2)"),
    (lambda: Flow((0, 1), ((0, 1), (0, 1))), "the feed (0, 1) is given twice"),
    (lambda: Flow((), ()), "each stage needs a rank"),
    (lambda: Flow((-1, 0), ()), "each stage needs a rank of at least 0"),
    (lambda: Flow.chain(0), "a chain needs at least 1 rank"),
    (lambda: simulate(build_schedule("gpipe", CHAIN, 1), even(Flow.chain(3))), "expected 2 stage(s), as the"),
    (lambda: Costs((1.0,), (1.0, 1.0), (0.5,)), "for each stage, got (1, 2, 1)"),
    (lambda: Costs((1.0,), (-1.0,), (0.5,)), "no time is negative"),
    (lambda: Costs((1.0,), (1.0,), (1.5,)), "weight is a share of backward"),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=[said[:50] for _, said in BAD])
def test_what_cannot_run_is_told(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        made = make()
        assert isinstance(made, Schedule)
        assert made.name == "mine", "what build_schedule returns is checked already"
        check_schedule(made)
    assert said in str(caught.value)


def test_a_schedule_that_cannot_run_has_no_timeline() -> None:
    stuck = by_hand(CHAIN, 2, "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(PlanError, match="never ends"):
        simulate(stuck, even(CHAIN))


def test_a_circle_of_three_is_told_without_those_who_only_wait_for_it() -> None:
    """Rank 0 waits for the circle, but is no part of it."""
    flow = Flow((0, 1, 2, 3, 1), ((1, 2), (2, 3), (3, 4), (0, 4)))
    good = build_schedule("gpipe", flow, 2)
    check_schedule(good)
    mine = "F1.0 F4.0 B4.0 B1.0 F1.1 F4.1 B4.1 B1.1"  # waits for rank 3 before it feeds rank 2 again
    lists = ["F0.0 F0.1 B0.0 B0.1", mine, "F2.0 F2.1 B2.0 B2.1", "F3.0 B3.0 F3.1 B3.1"]
    with pytest.raises(PlanError) as caught:
        check_schedule(by_hand(flow, 2, *lists))
    said = str(caught.value)
    assert "rank 2 can't run F2.1 before F1.1 of rank 1" in said
    assert "rank 0" not in said
