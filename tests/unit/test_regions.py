"""Which values of a model lie in parts along the sequence: on small traced models, without a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretches import cut_at
from stretto.graph.cut import plan_cut
from stretto.graph.localize import ENTER, GATHER, OWN, SCATTER, Localizer
from stretto.graph.regions import Regions, find_regions
from stretto.graph.rules import read
from stretto.graph.stages import work_of
from stretto.graph.trace import Traced, trace


class Two(nn.Module):
    """Two networks that are cut, and ``between`` what the first gives and what the second is given; with ``again`` the
    mean of all places is added to what that gives."""

    def __init__(self, between: Callable[[Two, Tensor], Tensor], turned: bool = False, again: bool = False) -> None:
        super().__init__()
        self.one, self.two = self._network(), self._network()
        self.norm, self.between, self.turned, self.again = nn.LayerNorm(4), between, turned, again
        self.gain = nn.Parameter(torch.ones(5, 1))

    @staticmethod
    def _network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.turned else x
        x = x + self.one(x)
        found: Tensor = self.two(self.between(self, x))
        return found + x.mean(1, keepdim=True) if self.again else found


def regions_of(model: nn.Module, *sizes: int, degree: int = 2) -> tuple[Regions, Traced, Localizer]:
    traced = trace(model.train(), (torch.randn(*sizes),), {})
    cut = plan_cut(read(traced), traced, degree)
    found = find_regions(cut, traced)
    trains = {name: True for name, _ in model.named_parameters()}
    return found, traced, Localizer(cut_at(work_of(traced, trains), ()), cut, 0, found)


def named(found: Regions, traced: Traced) -> tuple[list[str], list[str]]:
    nodes = traced.graph.graph.nodes
    return [n.name for n in nodes if n in found.axes], [n.name for n in nodes if n in found.partial]


def calls(localizer: Localizer) -> list[str]:
    """The modules that the only stage calls."""
    known = {name: nn.Identity() for name in (ENTER, GATHER, OWN, SCATTER, "leave", "drop", "collect")}
    graph = localizer.build(0, known).graph.graph
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def test_a_region_goes_from_a_sum_to_the_next_cut_layer() -> None:
    found, traced, localizer = regions_of(Two(lambda of, x: of.norm(x)), 3, 5, 4)
    assert named(found, traced) == (["linear_1", "add", "layer_norm"], []) and found.lengths == (5,)
    entered = [ENTER] * 3  # the bias, and the norm's two
    assert sorted(calls(localizer)) == sorted([*entered, SCATTER, OWN, GATHER, "leave"])


def test_the_batch_is_never_the_sequence() -> None:
    for turned in (False, True):
        found, _, localizer = regions_of(Two(lambda of, x: of.norm(x), turned), 7, 5, 4)
        assert found.lengths == (5,), "the longer dimension is the first of the model's input"
        sizes = {tuple(localizer.shape(node)) for node in found.axes}
        assert sizes == ({(3, 7, 4)} if turned else {(7, 3, 4)}), "the first part of five places is three"


def test_what_looks_at_neighbours_is_whole_and_its_gradient_a_part_of_a_sum() -> None:
    def shifted(of: Two, x: Tensor) -> Tensor:
        found: Tensor = of.norm(x)
        return found + F.pad(found, (0, 0, 1, 0))[:, :-1]

    found, traced, localizer = regions_of(Two(shifted), 3, 5, 4)
    within, partial = named(found, traced)
    assert within == ["linear_1", "add", "layer_norm"] and partial[0] == "pad" and partial[-1] == "add_1"
    assert calls(localizer).count(GATHER) == 1, "the norm is gathered once, for both"


def test_what_also_goes_elsewhere_has_the_whole_gradient() -> None:
    found, traced, localizer = regions_of(Two(lambda of, x: of.norm(x), again=True), 3, 5, 4)
    assert named(found, traced) == (["linear_1", "add", "layer_norm", "linear_3", "add_1"], []), "the mean is whole"
    assert calls(localizer).count("collect") == 2, "what the mean is taken of, and the output"


def test_a_parameter_of_each_place_is_cut_and_one_in_place_ends_the_region() -> None:
    found, traced, localizer = regions_of(Two(lambda of, x: (x * of.gain).mul_(2.0)), 3, 5, 4)
    assert named(found, traced)[0] == ["linear_1", "add"]
    found, traced, localizer = regions_of(Two(lambda of, x: x * of.gain), 3, 5, 4)
    assert named(found, traced)[0] == ["linear_1", "add", "mul"] and calls(localizer).count(OWN) == 2


@pytest.mark.parametrize(
    ("sizes", "degree", "says"),
    [
        ((3, 4), 2, "no sum of a cut layer has a dimension beside the batch and the features"),
        ((3, 2, 4), 3, "its sequence of 2 is shorter than tp=3"),
    ],
)
def test_without_a_region_the_reason_is_said(sizes: tuple[int, ...], degree: int, says: str) -> None:
    found, _, _ = regions_of(Two(lambda of, x: of.norm(x)), *sizes, degree=degree)
    assert (dict(found.axes), found.partial, found.why) == ({}, frozenset(), says)
