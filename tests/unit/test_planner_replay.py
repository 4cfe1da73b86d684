"""Ranks' notes played together: who waits for whom, what is hidden, and what doesn't fit together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stretto.planner.candidates import candidates
from stretto.planner.replay import Event, replay
from stretto.planner.tables import LinkTable, interpolate
from stretto.schedule import SCHEDULES


@dataclass(frozen=True)
class Prices:
    """A second for a collective, two for a message."""

    background: bool = False

    def collective(self, kind: str, members: tuple[int, ...], num_bytes: int) -> float:
        return 1.0

    def message(self, num_bytes: int) -> float:
        return 2.0


def both(first: int, number: int) -> tuple[Event, Event]:
    return ("begin", number, "all_reduce", (0, 1), 8 * first), ("wait", number)


def test_a_collective_begins_when_the_last_has_come() -> None:
    ranks = [(("work", 3.0), *both(1, 1), ("work", 1.0)), (("work", 5.0), *both(1, 7), ("work", 1.0))]
    found = replay(ranks, Prices())
    assert found.seconds == 7.0 and found.work == (4.0, 6.0)
    assert found.exposed == ({"all_reduce": 3.0}, {"all_reduce": 1.0})


def test_in_the_background_work_hides_what_it_lasts() -> None:
    ranks = [(("begin", 1, "all_reduce", (0, 1), 8), ("work", 0.75), ("wait", 1))] * 2
    assert replay(ranks, Prices(background=True)).seconds == 1.0
    assert replay(ranks, Prices()).seconds == 1.75, "in the foreground nothing is hidden"


def test_one_link_carries_one_call_after_another() -> None:
    begins = tuple(("begin", number, "all_reduce", (0, 1), 8) for number in (1, 2, 3))
    ranks = [(*begins, ("work", 1.5), ("wait", 3), ("wait", 1), ("wait", 2))] * 2
    assert replay(ranks, Prices(background=True)).seconds == 3.0


@pytest.mark.parametrize(("background", "seconds"), [(False, 4.5), (True, 4.5)])
def test_a_message_is_there_once_it_was_sent(background: bool, seconds: float) -> None:
    sender = ("work", 2.0), ("send", 1, 1, 8, 0), ("await", 1)
    receiver = ("receive", 1, 0, 8, 0), ("work", 1.0), ("await", 1), ("work", 0.5)
    found = replay([sender, receiver], Prices(background))
    assert found.seconds == seconds
    assert found.exposed[1] == {"receive": 3.0}


def test_messages_of_one_tag_come_in_order_and_of_others_apart() -> None:
    sender = ("send", 1, 1, 8, 5), ("work", 10.0), ("send", 2, 1, 8, 6)
    receiver = ("receive", 1, 0, 8, 6), ("receive", 2, 0, 8, 5), ("await", 2), ("work", 0.0), ("await", 1)
    found = replay([sender, receiver], Prices(background=True))
    assert found.seconds == 12.0 and found.exposed[1]["receive"] == 12.0


def test_notes_that_do_not_fit_together_are_told() -> None:
    with pytest.raises(ValueError, match="rank 1 is in broadcast, others in all_reduce"):
        replay([both(1, 1), (("begin", 1, "broadcast", (0, 1), 8), ("wait", 1))], Prices())
    with pytest.raises(ValueError, match=r"don't fit together: rank 0 in \('wait', 1\)"):
        replay([both(1, 1), ()], Prices())


def test_a_curve_is_straight_on_logarithmic_axes_and_goes_on_at_its_last_rate() -> None:
    curve = ((64, 1e-4), (6400, 1e-2))
    assert interpolate(curve, 1) == 1e-4 and interpolate(curve, 640) == pytest.approx(1e-3)
    assert interpolate(curve, 12800) == pytest.approx(2e-2)


def test_a_table_takes_the_nearest_number_of_members_and_survives_json() -> None:
    curves = {("all_reduce", 2): ((64, 1.0),), ("all_reduce", 8): ((64, 3.0),), ("message", 2): ((64, 0.5),)}
    table = LinkTable.from_json(LinkTable("gloo", True, curves).to_json())
    assert [table.collective("all_reduce", range(count), 8) for count in (1, 2, 3, 8, 64)] == [0.0, 1.0, 1.0, 3.0, 3.0]
    assert table.collective("broadcast", (0, 1), 64) == 1.0, "of a kind that nobody measured: an all-reduce"
    assert table.message(128) == 1.0 and table.background


def test_candidates_are_all_plans_of_so_many_workers_and_no_microbatch_is_empty() -> None:
    found = candidates(2, 8)
    assert len(set(map(str, found))) == len(found) and {plan.world_size for plan in found} == {2}
    zeros, inside, branch = {0, 1, 2, 3}, {False, True}, {2}
    assert {plan.zero for plan in found if plan.dp == 2} == zeros
    assert {plan.sequence for plan in found if plan.tp == 2} == inside
    assert {plan.branch for plan in found if plan.branch > 1} == branch
    stages = {(plan.schedule, plan.microbatches) for plan in found if plan.pp == 2}
    assert stages == {(schedule, count) for schedule in SCHEDULES for count in (2, 4, 8)}
    assert max(plan.microbatches for plan in candidates(2, 5) if plan.pp == 2) == 4
    assert all(plan.microbatches * plan.dp <= 16 for plan in candidates(4, 16, "full"))


def test_microbatches_without_a_pipeline_come_where_memory_is_to_be_saved() -> None:
    assert {plan.microbatches for plan in candidates(2, 8) if plan.pp == 1} == {1}
    saving = candidates(2, 8, "full")
    assert {plan.microbatches for plan in saving if plan.dp == 2} == {1, 2, 4}
    assert {plan.recompute for plan in saving} == {"full"}
    assert list(map(str, candidates(1, 4))) == ["dp=1"]
