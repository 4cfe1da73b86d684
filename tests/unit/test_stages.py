"""A traced graph cut into stages: every operation once, what passes between them, and where it may be cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretches import cut_at
from stretto.errors import Refused
from stretto.graph.balance import balanced
from stretto.graph.stages import MESSAGE_BYTES, Stages, Work, stages_like, work_of
from stretto.graph.trace import trace
from stretto.parallel.measure import _alike


class Skips(nn.Module):
    """A table used at both ends, a value that skips the middle, a change in place, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 3).unsqueeze(-1).to(self.scale.dtype)
        x = self.table(ids)
        skip = x
        for place, layer in enumerate(self.layers):
            x = layer(x) * self.scale
            if place == 1:
                x.mul_(2.0)
        self.calls.add_(1)
        return (x + skip * mask) @ self.table.weight.t()


def worked(module: nn.Module, *inputs: Tensor) -> Work:
    traced = trace(module.train(), inputs, {})
    return work_of(traced, {name: p.requires_grad for name, p in module.named_parameters()})


def ids() -> Tensor:
    return torch.arange(12).reshape(3, 4) % 11


def names(stages: Stages, to: int) -> dict[int, list[str]]:
    return {source: [str(node) for node in values] for source, values in stages.incoming[to].items()}


def test_every_operation_runs_in_one_stage_and_what_it_needs_comes_straight_there() -> None:
    work = worked(Skips(), ids())
    edges = work.edges
    stages = cut_at(work, (edges[1], edges[3]))
    own = [node for nodes in stages.nodes for node in nodes if node in work.nodes]
    assert sorted(map(str, own)) == sorted(map(str, work.nodes)), "each once"
    assert all(source < to for to, sources in enumerate(stages.incoming) for source in sources)
    assert "embedding" in names(stages, 2)[0], "the skip passes over the second stage"
    assert stages.users["table.weight"] == (0, 2) and stages.users["scale"] == (1, 2)
    assert {str(node) for node in work.free} >= {"gt", "unsqueeze"}, "what the input alone makes is made again"
    assert stages.changes == {"calls": 2}


def test_no_stage_begins_between_a_value_and_its_change_in_place() -> None:
    work = worked(Skips(), ids())
    changed = next(place for place, node in enumerate(work.nodes) if str(node) == "mul_")
    assert work.nodes[changed].args[0] is work.nodes[changed - 1]
    assert changed not in work.edges and changed + 1 in work.edges


def test_what_passes_is_counted_with_the_parameters_of_both_sides() -> None:
    work = worked(Skips(), ids())
    crossing = work.crossing_bytes()
    table, skip, x, scale = (4 * count + MESSAGE_BYTES for count in (11 * 8, 12 * 8, 12 * 8, 8))
    last_layer = next(at for at, node in enumerate(work.nodes) if str(node) == "linear_3")
    assert crossing[last_layer] == table + skip + x + scale, "the table, what skips, what goes on, and the scale"


def test_another_graph_of_the_model_is_cut_by_the_parameters() -> None:
    module = Skips()
    first = worked(module, ids())
    stages = cut_at(first, (first.edges[2],))
    again = stages_like(worked(module, ids()[:2]), stages)
    assert again.users == stages.users


class Turned(nn.Module):
    """In evaluation its layers come in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.one, self.two) if self.training else (self.two, self.one)
        return second(first(x).relu())  # type: ignore[no-any-return]


def test_layers_in_another_order_are_refused_by_name() -> None:
    module = Turned()
    first = worked(module, torch.randn(2, 4))
    stages = cut_at(first, (first.edges[1],))
    assert stages.users["one.weight"] == (0,) and stages.users["two.weight"] == (1,)
    traced = trace(module.eval(), (torch.randn(2, 4),), {})
    with pytest.raises(Refused, match=r"in another order than in training: one\.bias, one\.weight"):
        stages_like(work_of(traced, {}), stages)


class Counted(nn.Module):
    """Statistics of its own between layers: no parameter says in which stage they lie. In evaluation they are read, and
    with ``moved`` at another place."""

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        self.moved = moved
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.moved and not self.training:
            x = x - self.mean * 2
        for place, layer in enumerate(self.layers):
            x = layer(x).relu()
            if place == 1:
                if self.training:
                    with torch.no_grad():
                        self.mean.mul_(0.9).add_(torch.dropout(x.detach(), 0.2, True).mean(0), alpha=0.1)
                x = x - self.mean * 2
        return x


def test_what_is_changed_without_gradients_is_known_and_read_where_it_is_changed() -> None:
    module = Counted()
    first = worked(module, torch.randn(5, 4))
    changes = next(at for at, node in enumerate(first.nodes) if "set_grad_enabled" in str(node.target))
    for start in (edge for edge in first.edges if edge <= changes):
        stages = cut_at(first, (start,))
        assert stages.changes == {"mean": 1} and stages.draws == (1,)
        traced = trace(module.eval(), (torch.randn(3, 4),), {})
        work = work_of(traced, {}, stages.changes)
        again = stages_like(work, stages)
        (reader,) = (node for node in traced.graph.graph.nodes if node.name == "mul")
        assert reader in again.nodes[1] and reader not in again.nodes[0], "the other stage's mean is an old one"


def test_a_buffer_that_would_be_read_where_it_is_old_is_refused_by_name() -> None:
    module = Counted(moved=True)
    first = worked(module, torch.randn(5, 4))
    stages = cut_at(first, (first.edges[1],))
    work = work_of(trace(module.eval(), (torch.randn(3, 4),), {}), {}, stages.changes)
    with pytest.raises(Refused, match=r"in another order than in training"):
        stages_like(work, stages)
    frozen = work_of(trace(Counted().eval(), (torch.randn(5, 4),), {}), {"layers.0.weight": True})
    still = cut_at(frozen, (frozen.edges[1],))
    with pytest.raises(Refused, match="another stage than in training uses or changes mean"):
        stages_like(first, still)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_stages_are_balanced_as_well_as_they_can_be(count: int) -> None:
    costs = [float(value) for value in torch.randint(1, 50, (14,), generator=torch.Generator().manual_seed(count))]
    edges = list(range(1, len(costs)))
    found = balanced(costs, edges, [0] * len(costs), count)

    def longest(starts: Any) -> float:
        places = [0, *starts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(places))

    def every(left: int, begin: int) -> Any:
        if not left:
            yield ()
            return
        for place in range(begin, len(costs) - left + 1):
            for rest in every(left - 1, place + 1):
                yield (place, *rest)

    assert len(found) == count - 1
    assert longest(found) == min(longest(starts) for starts in every(count - 1, 1))


def test_more_stages_than_places_are_refused_with_the_number_that_there_are() -> None:
    with pytest.raises(Refused, match="5 stages are asked for, and the model can be cut into 3"):
        balanced([1.0] * 6, [2, 4], [0] * 6, 5)


def test_what_passes_has_a_price() -> None:
    assert balanced([1.0] * 4, [1, 2, 3], [0, 0, 10**10, 0], 2) == (1,), "the middle would pass 10 GB"


def test_equal_layers_cost_the_same_whatever_the_clock_says() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)), nn.Linear(4, 2))
    work = worked(layers, torch.randn(3, 4))
    measured = {node: (float(place**2), 2.0 * place**2) for place, node in enumerate(work.nodes)}
    found = [_alike(work, measured)[node] for node in work.nodes]
    assert found[2:10:2] == [(26.0, 52.0)] * 4, "the median of 4, 16, 36 and 64"
    assert found[1:10:2] == [(25.0, 50.0)] * 5
    assert found[0] == (0.0, 0.0), "a kind of its own: nothing goes back to its input"
    assert found[10] == (100.0, 200.0), "the last is of another size"
