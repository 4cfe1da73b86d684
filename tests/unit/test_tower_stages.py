"""Towers on several ranks each, in stages that take as long as one another, with what they have in common beside."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from torch import nn

from made_graphs import check_assignment, random_work, work
from stretto.errors import Refused
from stretto.graph.assignment import Assignment
from stretto.graph.stages import Work, stages_of
from stretto.graph.towers import find_towers
from stretto.graph.trace import trace
from stretto.parallel.staged import stage
from stretto.plan import Plan
from stretto.schedule import SCHEDULES, Costs, Flow, build_schedule, simulate


def fork(stem: int, one: int, other: int, head: int) -> Work:
    """Chains: one, two beside each other, and one that begins where they meet."""
    needs: list[tuple[int, ...]] = []

    def chain(length: int, *first: int) -> int:
        for at in range(length):
            needs.append((len(needs) - 1,) if at else first)
        return len(needs) - 1

    roots = (chain(stem),) if stem else ()
    ends = chain(one, *roots), chain(other, *roots)
    chain(head, *ends)
    return work(needs)


def cut(graph: Work, pp: int, chunks: int = 1, branch: int = 2) -> Assignment:
    """Every operation takes a second, forward and backward."""
    return find_towers(graph, [1.0] * len(graph.nodes), branch, pp, chunks)[0]


def loads(found: Assignment) -> list[int]:
    """Operations of each rank."""
    counted = Counter(found.ranks[stage] for stage in found.stages)
    return [counted[rank] for rank in sorted(counted)]


def test_each_tower_has_ranks_of_its_own_in_stages_of_one_length() -> None:
    found = cut(fork(0, 4, 4, 1), 2)
    assert [found.ranks[stage] for stage in found.stages[:8]] in ([0, 0, 1, 1, 2, 2, 3, 3], [2, 2, 3, 3, 0, 0, 1, 1])
    assert found.ranks[-1] == 3 and found.stages[-1] == len(found.ranks) - 1 == 4


def test_a_longer_tower_has_longer_stages() -> None:
    assert loads(cut(fork(0, 8, 6, 2), 3)) == [3, 3, 3, 2, 3, 3], "the head is beside the shorter tower"


def shortest(stem: int, one: int, other: int, head: int) -> int:
    """Of the longest of four ranks, over all ways to cut two towers in two, and what is common in two beside them."""
    least = stem + one + other + head
    for a, b, before, after in product(range(1, one), range(1, other), range(stem + 1), range(head + 1)):
        ranks = (before + a, after + one - a, stem - before + b, head - after + other - b)
        least = min(least, max(ranks))
    return least


@pytest.mark.parametrize("seed", range(60))
def test_what_is_common_makes_the_longest_rank_as_short_as_it_can_be(seed: int) -> None:
    drawn = random.Random(seed)
    stem, head = drawn.choice((0, 0, 1, 3, 8)), drawn.choice((1, 2, 4, 9))
    one, other = drawn.randrange(3, 9), drawn.randrange(3, 9)
    found = cut(fork(stem, one, other, head), 2)
    # The first summand of the join is the end of its tower.
    assert max(loads(found)) <= shortest(stem, one + 1, other, head) + 1, (stem, one, other, head, loads(found))
    assert sum(loads(found)) == stem + one + 1 + other + head


def test_mostly_it_is_exactly_so() -> None:
    sizes = [*product((0, 2, 5), (4, 6), (3, 6), (1, 3, 8))]
    hits = sum(max(loads(cut(fork(*size), 2))) <= shortest(size[0], size[1] + 1, *size[2:]) for size in sizes)
    assert hits >= 0.95 * len(sizes), hits / len(sizes)


def test_what_lies_between_forks_is_dealt_as_well() -> None:
    needs: list[tuple[int, ...]] = [()]
    for _ in range(4):
        start = len(needs) - 1
        needs += [(start,), (start,), (start + 1, start + 2)]  # two beside each other, and what adds them up
        needs += [(len(needs) - 1 + more,) for more in range(5)]
    found = cut(work(needs), 2)
    assert max(loads(found)) <= 1.1 * len(found.stages) / 4, loads(found)


def test_a_little_more_of_a_head_is_not_worth_a_message() -> None:
    found = cut(fork(0, 39, 40, 2), 2)
    assert [found.ranks[stage] for stage in found.stages[-2:]] == [3, 3] and max(loads(found)) == 21


def test_a_step_of_towers_in_stages_has_the_bubble_of_their_length_not_of_all_ranks() -> None:
    found, chain = cut(fork(0, 4, 4, 0), 2), Flow.chain(4)
    graph = fork(0, 4, 4, 0)
    flow = Flow(found.ranks, stages_of(graph, found).feeds)
    seconds = {}
    for name, flow_of in (("towers", flow), ("stages", chain)):
        sizes = [found.stages.count(at) for at in range(len(flow_of.ranks))]
        share = tuple(1.0 if name == "stages" else size / 2 for size in sizes)
        costs = Costs(share, tuple(2 * one for one in share), (0.5,) * len(share))
        seconds[name] = simulate(build_schedule("1f1b", flow_of, 8), costs).seconds
    assert seconds == {"towers": 3.0 * (8 + 1), "stages": 3.0 * (8 + 3)}


def test_chunks_are_dealt_to_a_tower_s_ranks_in_turn() -> None:
    found = cut(fork(0, 8, 8, 1), 2, chunks=2)
    of = [found.ranks[stage] for stage in found.stages]
    assert [one % 2 for one in of[:8]] == [one % 2 for one in of[8:16]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {one // 2 for one in of[:8]} != {one // 2 for one in of[8:16]}


@pytest.mark.parametrize(
    ("pp", "chunks", "says"),
    [
        (4, 1, "branch=2 beside pp=4 cuts each tower into 4 stages, and .* can be cut into 3; use branch=2,pp=3"),
        (2, 2, r"into 4 stages \(pp times chunks\), and .* can be cut into 3; use branch=2 without pp"),
    ],
)
def test_a_tower_of_fewer_operations_than_stages_is_refused_with_what_works(pp: int, chunks: int, says: str) -> None:
    graph = fork(1, 5, 3, 1)
    with pytest.raises(Refused, match=says):
        cut(graph, pp, chunks)
    assert set(cut(graph, 3).ranks) == set(range(6))


def test_what_is_sent_anyway_makes_no_place_of_a_lane_dearer() -> None:
    """The first operation's value goes to another lane wherever its own is cut."""
    graph = work(((), (0,), (1,), (), (0, 3)))
    passing = graph.crossing_bytes([0, 1, 2])
    assert passing[1] == passing[2] == graph.crossing_bytes([1, 2])[1] > 0


class Drawing(nn.Module):
    """Two towers that draw random numbers at their ends, and not between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Dropout(0.5), *(nn.Linear(4, 4) for _ in range(8)), nn.Dropout(0.5), nn.Linear(4, 4))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.one(x) * self.other(x)
        return found


def test_stages_of_one_tower_are_not_said_to_wait_for_one_another() -> None:
    module = Drawing()
    trains = {name: True for name, _ in module.named_parameters()}

    def even(work: Work) -> list[tuple[float, float]]:
        return [(1.0, 1.0)] * len(work.nodes)

    found = stage(trace(module, (torch.randn(3, 4),), {}), trains, Plan.parse("branch=2,pp=3"), even)
    (note,) = found.notes
    assert note.startswith("one.9 and other.0 both draw random numbers")


def test_no_towers_are_refused_with_what_so_many_ranks_can_have_instead() -> None:
    with pytest.raises(Refused, match=r"no towers for 2 times 2 ranks: everything depends on .* use pp=4"):
        cut(work(((), (0,), (1,), (2,))), 2)
    with pytest.raises(Refused, match=r"no more than 2 lie side by side .* use branch=2,pp=2"):
        cut(fork(0, 3, 3, 1), 2, branch=3)


@pytest.mark.parametrize("seed", range(120))
def test_whatever_the_graph_every_schedule_of_it_can_run(seed: int) -> None:
    drawn = random.Random(seed)
    graph, costs = random_work(drawn)
    branch, pp, chunks = drawn.choice((2, 2, 3)), drawn.choice((1, 2, 2, 3)), drawn.choice((1, 1, 2))
    try:
        found, _ = find_towers(graph, costs, branch, pp, chunks if pp > 1 else 1)
    except Refused:
        return
    check_assignment(graph, found, branch * pp)
    flow = Flow(found.ranks, stages_of(graph, found).feeds)
    for name in SCHEDULES:
        if name != "interleaved" or max(map(len, flow.stages_of)) > 1:
            build_schedule(name, flow, drawn.choice((1, 3, 5)))  # is checked there


def test_enough_of_these_graphs_are_cut_and_keep_a_tower_on_its_own_ranks() -> None:
    """So that the test above looks at something."""
    seen = 0
    for seed in range(120):
        graph, costs = random_work(random.Random(seed))
        try:
            flat, _ = find_towers(graph, costs, 2)
            found, _ = find_towers(graph, costs, 2, 2)
        except Refused:
            continue
        lanes = [found.ranks[stage] // 2 for stage in found.stages]
        towers = [place for place, stage in enumerate(flat.stages) if flat.ranks[stage] == 0]  # never common
        seen += 1
        assert len({lanes[place] for place in towers}) == 1, "a tower's operations are one lane's"
        own = [found.ranks[found.stages[place]] for place in towers]
        assert len(set(own)) == 2 or len(towers) == 1
        assert all(one <= other for one, other in pairwise(sorted(own)))
    assert seen >= 20
