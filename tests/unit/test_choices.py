"""Which of several predicted plans is taken, why, and what would change that."""

from __future__ import annotations

from stretto.choose import Choice, Room, binds, changes, fitting, frontier, ranked, why_second


def choice(plan: str, seconds: float, megabytes: int, risk: float = 0.0, quicker: float | None = None) -> Choice:
    room = Room(megabytes * 10**6 // 4, megabytes * 10**6 // 2, megabytes * 10**6, risk)
    work = 0.6 * seconds
    return Choice(plan, seconds, work, {"all_reduce": seconds - work}, quicker or 0.8 * seconds, room)


FAST, SMALL, BIG, REFUSED = (
    choice("dp=2", 0.2, 400),
    choice("dp=2,zero=3", 0.25, 200, quicker=0.15),
    choice("tp=2", 0.1, 900, risk=0.9),
    Choice("pp=2", refused="for a reason"),
)


def test_the_fastest_that_fits_comes_first_and_what_is_refused_last() -> None:
    found = ranked([REFUSED, BIG, SMALL, FAST])
    assert [one.plan for one in found] == ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"]
    assert [one.plan for one in fitting(found)] == ["dp=2", "dp=2,zero=3"]


def test_what_would_change_the_answer_is_told() -> None:
    assert changes([FAST, SMALL, BIG, REFUSED]) == [
        "links twice as fast: 150.0 ms with dp=2,zero=3",
        "more memory, 858 MiB a worker: 100.0 ms with tp=2",
    ]
    assert changes([FAST, REFUSED]) == ["links twice as fast: 160.0 ms with the same plan", "more memory: nothing"]
    assert binds(FAST) == "messages and waiting (all_reduce)"
    assert why_second(FAST, SMALL) == "dp=2,zero=3 takes 50.0 ms more: its ranks work longer"


def test_the_frontier_has_no_plan_that_another_beats_in_both() -> None:
    slow = choice("dp=1", 0.3, 300)
    assert frontier([FAST, slow, SMALL, BIG, REFUSED]) == [(2e8, 0.25), (4e8, 0.2), (9e8, 0.1)]


def test_a_choice_comes_back_from_json_whole() -> None:
    for one in (FAST, REFUSED):
        assert Choice.from_json(one.to_json()) == one
    assert FAST.room is not None and sum(FAST.room.parts.values()) == FAST.memory_bytes
