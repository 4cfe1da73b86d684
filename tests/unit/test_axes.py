"""Axes that are one and the same, and what of a model is cut by them: on small traced models, without a process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import Refused
from stretto.graph.axes import Axes, leaves, size
from stretto.graph.cut import plan_cut, report
from stretto.graph.rules import read
from stretto.graph.trace import trace
from stretto.state import Box, tiling_fault


def test_a_view_refines_what_it_splits() -> None:
    axes = Axes()
    (long,), (heads, width) = axes.dims((12,)), axes.dims((3, 4))
    axes.same(long, heads + width)
    assert [axis.size for axis in leaves(long)] == [3, 4]
    assert leaves(long) == leaves(heads + width)
    ((other,), (half, two)) = axes.dims((12,)), axes.dims((6, 2))
    axes.same(other, long)
    axes.same(other, half + two)
    assert [axis.size for axis in leaves(long)] == [3, 2, 2], "a second view refines further what is the same by now"
    assert size(half) == 6 and leaves(half) == leaves(long)[:2]


def test_sizes_without_a_common_part_are_blocked_not_guessed() -> None:
    axes = Axes()
    six, four = axes.dims((6, 4)), axes.dims((4, 6))
    axes.same(six[0] + six[1], four[0] + four[1])
    assert all(axis.blocked for dim in (*six, *four) for axis in leaves(dim))


def test_what_is_blocked_stays_so_through_union_and_split() -> None:
    axes = Axes()
    (long,), (one,), (two, three) = axes.dims((6,)), axes.dims((6,)), axes.dims((2, 3))
    long[0].block("reason")
    axes.same(one, long)
    axes.same(one, two + three)
    assert {axis.blocked for axis in leaves(two + three)} == {"reason"}


class Heads(nn.Module):
    """Attention over a fused weight, its heads split by a view."""

    def __init__(self, heads: int = 4, shared: int = 1) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.into = nn.Linear(8, 3 * 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.into(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value)), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Grouped(nn.Module):
    """Attention whose keys and values are each shared by two query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, n, bias=False) for n in (8, 4, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 2).transpose(1, 2)
        key, value = (
            part(x).view(batch, length, 2, 2).transpose(1, 2)[:, :, None].expand(-1, -1, 2, -1, -1)
            for part in (self.key, self.value)
        )
        key, value = (part.reshape(batch, 4, length, 2) for part in (key, value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, length, 8))


class Gated(nn.Module):
    """Two halves of one weight, one of which gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Mixed(nn.Module):
    """A softmax over the hidden features: they are needed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 8))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 8, 3, padding=1))


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, tuple[int, int] | str]]] = {
    "plain": (plain, (2, 8), {"0.weight": (0, 12), "0.bias": (0, 12), "3.weight": (1, 12), "3.bias": "output"}),
    "fused heads": (Heads, (2, 5, 8), {"into.weight": (0, 4), "into.bias": (0, 4), "out.weight": (1, 4)}),
    "grouped heads": (Grouped, (2, 5, 8), {"query.weight": (0, 2), "key.weight": (0, 2), "out.weight": (1, 2)}),
    "gated": (Gated, (2, 8), {"up.weight": (0, 6), "up.bias": (0, 6), "down.weight": (1, 6), "down.bias": "output"}),
    "softmax": (Mixed, (2, 8), {"up.weight": "softmax runs over it", "down.weight": "softmax runs over it"}),
    "convolutions": (convolutions, (2, 8, 7), {"0.weight": (0, 6), "2.weight": (1, 6), "2.bias": "output"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_cut_and_why_the_rest_is_not(case: str) -> None:
    build, shape, expected = CASES[case]
    traced = trace(build(), (torch.randn(shape),), {})
    cut = plan_cut(read(traced), traced, 2)
    said = report(cut, traced)
    for name, what in expected.items():
        if isinstance(what, str):
            assert said[name].startswith("whole") and what in said[name], said[name]
        else:
            assert said[name] == f"dimension {what[0]} cut along an axis of {what[1]}", (name, said[name])


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_the_parts_of_all_ranks_tile_each_parameter(degree: int) -> None:
    """12 in 5 parts are 3, 3, 2, 2, 2. A fused weight's part is three boxes, each with a third of the heads' rows."""
    for build, shape in ((plain, (2, 8)), (lambda: Heads(8), (2, 5, 8))):
        model = build()
        traced = trace(model, (torch.randn(shape),), {})
        cut = plan_cut(read(traced), traced, degree)
        assert cut.axes
        for node in traced.graph.graph.nodes:
            if node.name not in traced.parameters:
                continue
            dims = cut.reading.of(node)
            parts = [cut.part(dims, rank) for rank in range(degree)]
            extent = tuple(model.get_parameter(traced.parameters[node.name]).shape)
            if cut.axis_of(dims) is None:
                assert all(part.boxes == (Box.whole(extent),) for part in parts)
                continue
            assert tiling_fault(extent, [box for part in parts for box in part.boxes]) is None
            for part in parts:
                whole = torch.arange(torch.Size(extent).numel()).view(extent)
                joined = torch.cat([whole[box.within(Box.whole(extent))] for box in part.boxes], part.dim)
                assert part.shape == tuple(joined.shape)


def test_a_degree_that_is_more_than_an_axis_has_leaves_it_whole() -> None:
    traced = trace(Heads(2), (torch.randn(2, 5, 8),), {})
    assert not plan_cut(read(traced), traced, 3).axes
    assert "2 are fewer than 3" in report(plan_cut(read(traced), traced, 3), traced)["into.weight"]


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if random.random() < 0.5 else 1)


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


@pytest.mark.parametrize(("kind", "says"), [(Draws, "from Python or NumPy"), (Chooses, "can't be traced")])
def test_what_a_trace_would_freeze_is_refused(kind: type[nn.Linear], says: str) -> None:
    with pytest.raises(Refused, match=says):
        trace(kind(4, 4), (torch.randn(2, 4),), {})
