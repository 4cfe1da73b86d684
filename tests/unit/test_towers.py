"""Towers found in hand-made graphs: what runs beside what, on which rank, in an order in which it can run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from made_graphs import Needs, check_assignment, random_work, work
from stretto.errors import Refused
from stretto.graph.stages import Work, stages_like, stages_of, work_of
from stretto.graph.towers import find_towers
from stretto.graph.trace import trace


def shown(needs: Needs, costs: Sequence[float], degree: int) -> tuple[list[int], list[int]]:
    """Of single operations, their ranks, and of each stage its rank. No operation here is two."""
    assert all(len(sources) < 2 for sources in needs[:-1])
    graph = work(needs)
    extra = len(graph.nodes) - len(needs)  # the last one may add up several
    found, _ = find_towers(graph, [*costs, *[0.0] * extra], degree)
    return [found.ranks[stage] for stage in found.stages[: len(needs)]], list(found.ranks)


TWO = ((), (0,), (), (2,), (1, 3))  # 0-1 beside 2-3, and 4 joins


def test_two_towers_have_a_rank_each_and_meet_on_the_last() -> None:
    ranks, stages = shown(TWO, (2, 2, 1, 1, 1), 2)
    assert ranks == [1, 1, 0, 0, 1], "the longer one where the tail is"
    assert stages == [0, 1, 1], "a stage for each tower, and the tail, which alone waits for both"


def test_a_stem_feeds_branches_the_longest_of_which_is_alone() -> None:
    needs = ((), (0,), (0,), (0,), (1, 2, 3))
    ranks, stages = shown(needs, (1, 5, 2, 2, 1), 2)
    assert ranks == [1, 1, 0, 0, 1]
    assert stages == [1, 0, 1, 1], "the stem, both ranks' branches, and the tail"
    assert shown(needs, (1, 5, 2, 2, 1), 3)[0][1:4] in ([2, 1, 0], [2, 0, 1])


def test_the_longest_is_dealt_first() -> None:
    ranks, _ = shown(((), (0,), (0,), (0,), (1, 2, 3)), (1, 2, 2, 9, 1), 2)
    assert ranks[1:4] == [0, 0, 1]


def test_towers_within_a_tower_are_found_where_they_save_more() -> None:
    needs = ((), (), (1,), (1,), (2, 3))
    graph = work((*needs[:4], (2, 3), (0, 4)))
    costs = [0.1, 1.0, 4.0, 4.0, *[0.1] * (len(graph.nodes) - 4)]
    found, _ = find_towers(graph, costs, 2)
    ranks = [found.ranks[stage] for stage in found.stages]
    assert ranks[2] != ranks[3], "the two long ones lie side by side, though all of them lie beside the first"


@pytest.mark.parametrize(
    ("needs", "costs", "degree", "says"),
    [
        (((), (0,), (1,), (2,)), (1, 1, 1, 1), 2, "everything depends on what comes before it; use pp=2"),
        (TWO, (2, 2, 1, 1, 1), 3, "no more than 2 lie side by side .* use branch=2"),
        (TWO, (50, 50, 1, 1, 1), 2, "would save 1.9%, which is less than 10%; use pp=2"),
    ],
)
def test_what_is_no_tower_is_refused(needs: Needs, costs: Sequence[float], degree: int, says: str) -> None:
    with pytest.raises(Refused, match=says):
        shown(needs, costs, degree)


def test_messages_have_a_price_and_what_costs_more_than_it_saves_is_said() -> None:
    graph = work(TWO)
    _, dear = find_towers(graph, [1e-6] * len(graph.nodes), 2)
    _, cheap = find_towers(graph, [1.0] * len(graph.nodes), 2)
    assert not cheap and "takes longer, by measurement, than they save" in dear[0]


def test_towers_that_draw_by_turns_stay_together() -> None:
    needs = ((), (), (0,), (1,), (2, 3))
    with pytest.raises(Refused, match="draw random numbers by turns"):
        find_towers(work(needs, draws=(0, 1, 2, 3)), [1.0] * len(work(needs, draws=(0, 1, 2, 3)).nodes), 2)
    graph = work(((), (0,), (), (2,), (1, 3)), draws=(0, 1, 2, 3))
    assert set(find_towers(graph, [1.0] * len(graph.nodes), 2)[0].ranks) == {0, 1}


@pytest.mark.parametrize("seed", range(150))
def test_whatever_the_graph_its_stages_can_run_and_draw_in_their_order(seed: int) -> None:
    drawn = random.Random(seed)
    graph, costs = random_work(drawn)
    degree = drawn.choice((2, 2, 3))
    try:
        found, _ = find_towers(graph, costs, degree)
    except Refused:
        return
    check_assignment(graph, found, degree)


def test_some_of_these_graphs_have_towers_that_draw() -> None:
    """So that the test above looks at something."""
    seen = 0
    for seed in range(150):
        drawn = random.Random(seed)
        graph, costs = random_work(drawn)
        try:
            found, _ = find_towers(graph, costs, drawn.choice((2, 2, 3)))
        except Refused:
            continue
        draws = stages_of(graph, found).draws
        seen += len({found.ranks[stage] for stage in draws}) > 1
    assert seen >= 20


class Twice(torch.nn.Module):
    """Two halves go through the same layers, or through each its own."""

    def __init__(self, norm: bool, shared: bool) -> None:
        super().__init__()
        self.one = self._layers(norm)
        self.other = None if shared else self._layers(norm)

    @staticmethod
    def _layers(norm: bool) -> torch.nn.Sequential:
        middle = torch.nn.BatchNorm1d(4) if norm else torch.nn.LayerNorm(4)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), middle, torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.one(x[:, :4]) - (self.other or self.one)(x[:, 4:])).square()
        return found


def traced(module: torch.nn.Module, length: int, training: bool = True) -> Work:
    found = trace(module.train(training), (torch.randn(length, 8),), {})
    return work_of(found, {name: True for name, _ in module.named_parameters()})


def test_statistics_that_two_towers_share_keep_them_together() -> None:
    for norm, shared in ((True, False), (False, True), (False, False)):
        graph = traced(Twice(norm, shared), 5)
        assert set(find_towers(graph, [1.0] * len(graph.nodes), 2)[0].ranks) == {0, 1}
    graph = traced(Twice(norm=True, shared=True), 5)
    with pytest.raises(Refused, match="finds no towers"):
        find_towers(graph, [1.0] * len(graph.nodes), 2)


def test_what_only_counts_batches_is_no_tower() -> None:
    chain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    graph = traced(chain, 5)
    assert any("add_" in str(node) for node in graph.nodes)
    with pytest.raises(Refused, match="everything depends on what comes before it"):
        find_towers(graph, [1.0] * len(graph.nodes), 2)


def test_towers_of_one_set_of_layers_are_told_apart_in_other_graphs_too() -> None:
    module = Twice(norm=False, shared=True)
    graph = traced(module, 5)
    first = stages_of(graph, find_towers(graph, [1.0] * len(graph.nodes), 2)[0])
    for length, training in ((3, True), (5, False), (1, False)):
        other = traced(module, length, training)
        again = stages_like(other, first)
        assert [again.of[node] for node in other.nodes] == [first.of[node] for node in graph.nodes]
        assert again.users == first.users and again.feeds == first.feeds
