"""Ranks' notes played together: who waits for whom, what is hidden, and what doesn't fit together."""

from __future__ import annotations

import dataclasses
import json
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
    second: float = 1.0  # pace of rank 1

    def collective(self, kind: str, members: tuple[int, ...], num_bytes: int, rested: float = 0.0) -> float:
        return 1.0

    def message(self, source: int, to: int, num_bytes: int, rested: float = 0.0) -> float:
        return 2.0

    def pace(self, rank: int) -> float:
        return 1.0 if rank == 0 else self.second


def test_work_lasts_as_long_as_on_the_rank_s_own_host() -> None:
    assert replay([(("work", 2.0),), (("work", 3.0),)], Prices(second=2.0)).work == (2.0, 6.0)


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


def test_in_the_background_a_message_leaves_once_it_is_expected() -> None:
    sender = ("work", 1.0), ("send", 1, 1, 8, 0), ("await", 1)
    receiver = ("work", 4.0), ("receive", 1, 0, 8, 0), ("work", 1.0), ("await", 1)
    found = replay([sender, receiver], Prices(background=True))
    assert found.seconds == 6.0 and found.exposed == ({"send": 5.0}, {"receive": 1.0})
    assert replay([sender, receiver], Prices()).exposed[0] == {"send": 1.0}, "in the foreground it waits in its room"


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


def test_on_one_way_what_was_sent_first_goes_first() -> None:
    sender = ("send", 1, 1, 8, 5), ("send", 2, 1, 8, 6)
    receiver = ("receive", 1, 0, 8, 5), ("receive", 2, 0, 8, 6), ("await", 2), ("work", 1.0), ("await", 1)
    assert replay([sender, receiver], Prices(background=True)).seconds == 5.0


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
    curves = {
        **{("all_reduce", 2, 1): ((64, 1.0),), ("all_reduce", 8, 1): ((64, 3.0),)},
        **{("message", 2, 1): ((64, 0.5),)},
    }
    table = LinkTable.from_json(LinkTable("gloo", True, curves).to_json())
    assert [table.collective("all_reduce", range(count), 8) for count in (1, 2, 3, 8, 64)] == [0.0, 1.0, 1.0, 3.0, 3.0]
    assert table.collective("broadcast", (0, 1), 64) == 1.0, "of a kind that nobody measured: an all-reduce"
    assert table.message(0, 1, 128) == 1.0 and table.background
    old = {"kind": "message", "members": 2, "bytes": [64], "seconds": [0.5]}  # as a file from before several hosts
    before = LinkTable.from_json({"transport": "gloo", "background": True, "curves": [old]})
    assert before.message(0, 7, 64) == 0.5


HOSTS = LinkTable(
    "gloo",
    True,
    {
        **{
            ("all_reduce", 2, 1): ((64, 1.0),),
            ("all_reduce", 2, 2): ((64, 10.0),),
            ("all_reduce", 6, 3): ((64, 30.0),),
        },
        **{("message", 2, 1): ((64, 0.5),), ("message", 2, 2): ((64, 8.0),)},
    },
    per_host=2,
    pairs={(0, 1): ((64, 4.0),), (0, 2): ((64, 4.0),), (1, 2): ((64, 8.0),)},
    paces=(1.0, 1.0, 2.5),
)


def test_ranks_of_one_host_talk_over_its_links_and_others_over_the_slowest_between_theirs() -> None:
    assert HOSTS.collective("all_reduce", (0, 1), 64) == HOSTS.collective("all_reduce", (4, 5), 64) == 1.0
    assert HOSTS.collective("all_reduce", (3, 5), 64) == 10.0, "over the slowest pair: what was measured"
    assert HOSTS.collective("all_reduce", (0, 2), 64) == 5.0, "over a pair twice as quick"
    assert HOSTS.collective("all_reduce", range(6), 64) == 30.0
    assert HOSTS.collective("all_reduce", (0, 1, 2, 3), 64) == 5.0, "the nearest number of members of two hosts"
    few = LinkTable("gloo", True, {("all_reduce", 2, 2): ((64, 9.0),), ("all_reduce", 4, 1): ((64, 1.0),)}, per_host=4)
    assert few.collective("all_reduce", (0, 1), 64) == 1.0, "of other members rather than over other links"
    messages = [HOSTS.message(source, to, 64) for source, to in ((0, 1), (1, 2), (5, 1), (5, 2))]
    assert messages == [0.5, 4.0, 4.0, 8.0]
    assert [HOSTS.pace(rank) for rank in (0, 3, 4, 9)] == [1.0, 1.0, 2.5, 1.0]


BURST = LinkTable(
    "gloo",
    True,
    {("all_reduce", 2, 2): ((8, 1.0), (64, 8.0)), ("all_reduce", 2, 1): ((64, 8.0),), ("message", 2, 2): ((64, 8.0),)},
    per_host=1,
    burst_seconds=3.0,
)


def test_a_link_that_has_rested_lets_pass_what_it_has_saved_up() -> None:
    rests = [0.0, 2.0, 9.0]
    found = [BURST.collective("all_reduce", (0, 1), 64, rest) for rest in rests]
    assert found == pytest.approx([8.0, 6.0, 5.0])
    assert BURST.collective("all_reduce", (0, 1), 8, 9.0) == 1.0, "never under the time of the least"
    within = dataclasses.replace(BURST, per_host=2)
    assert within.collective("all_reduce", (0, 1), 64, 9.0) == pytest.approx(8.0), "within a host no rate is held"


def test_the_rest_is_from_the_last_call_s_end_to_the_next_one_s_begin() -> None:
    call = both(8, 1)
    assert replay([call, call], BURST).seconds == pytest.approx(5.0), "before a step nothing was sent"
    again = (*call, ("work", 2.0), *both(8, 2))
    assert replay([again, again], BURST).seconds == pytest.approx(5.0 + 2.0 + 6.0)
    messages = ("send", 1, 1, 64, 0), ("send", 2, 1, 64, 0), ("await", 1), ("await", 2)
    receiver = ("receive", 1, 0, 64, 0), ("receive", 2, 0, 64, 0), ("await", 1), ("await", 2)
    table = dataclasses.replace(BURST, curves={("message", 2, 2): ((8, 1.0), (64, 8.0))})
    assert replay([messages, receiver], table).seconds == pytest.approx(5.0 + 8.0)


def test_a_table_of_hosts_survives_json() -> None:
    for one in (HOSTS, BURST):
        assert LinkTable.from_json(json.loads(json.dumps(one.to_json()))) == one


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
