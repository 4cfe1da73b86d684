"""Stages of the traced graph that are computed again: where they are cut, that nothing is done twice, what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from stretches import cut_at
from stretto.comm.members import Broken, Members
from stretto.graph import pieces
from stretto.graph.cut import Cut, plan_cut
from stretto.graph.pieces import PIECE_BYTES, piece_starts
from stretto.graph.reading import Reading
from stretto.graph.rules import read
from stretto.graph.stages import work_of
from stretto.graph.trace import trace
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.deferred import Deferred, work_off
from stretto.parallel.program import Portioned, Program
from stretto.parallel.stretches import Repeating
from stretto.task import load_task
from stretto.testing.live import LiveBytes

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"
MEGA = 2**20


class Counting(Members):
    """The first of some members; the others say nothing, which is noted."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, torch.device("cpu"), None, Broken())
        self.asked = 0

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> None:
        self.asked += 1


def program_of(
    model: nn.Module,
    x: Tensor,
    how: str,
    tensor: Members | None = None,
    later: Deferred | None = None,
    ahead: int = 1,
) -> Program:
    """The whole model as one stage."""
    tensor = tensor or Counting(1)
    traced = trace(model.train(), (x,), {})
    stages = cut_at(work_of(traced, {name: True for name, _ in model.named_parameters()}), ())
    cut = Cut(Reading(), frozenset(), 1) if tensor.size == 1 else plan_cut(read(traced), traced, tensor.size)
    if tensor.size > 1:
        model = cut_down(model, cut, traced.parameters)
    repeating = None if how == "none" else Repeating(how, {0: ahead}, nullcontext)
    norm = GlobalBatchNorm(model, tensor if tensor.size == 1 else tensor.alone())
    return Program.build(stages, cut, tensor, [0], model, later, repeating, norm)


def cut_down(model: nn.Module, cut: Cut, names: Mapping[str, str]) -> nn.Module:
    """The first rank's part of each parameter."""
    from stretto.parallel.inside import give_parts

    parts = {names[node.name]: cut.part(cut.reading.of(node), 0) for node in cut.reading.dims if node.name in names}
    give_parts(model, {name: parts[name] for name, _ in model.named_parameters()})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def once(portion: Portioned, x: Tensor) -> Tensor:
    output: Tensor = portion.run([x], []).output
    return output


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


# ---------------------------------------------------------------------------------------------- where it is cut


def test_a_chain_is_cut_about_the_square_root_of_its_length_apart() -> None:
    made = [MEGA] * 64
    starts = piece_starts(made, [0, *made[1:]], range(1, 64), ahead=1)
    lengths = [b - a for a, b in pairwise([0, *starts, 64])]
    assert 6 <= len(lengths) <= 10 and max(lengths) - min(lengths) <= 5


def test_it_is_cut_where_little_passes_and_only_where_it_may_be() -> None:
    made = [MEGA] * 40
    passing = [5 * MEGA if place % 5 else MEGA // 2 for place in range(40)]
    assert all(start % 5 == 0 for start in piece_starts(made, passing, range(1, 40), ahead=2))
    assert set(piece_starts(made, passing, [7, 22], ahead=1)) <= {7, 22}
    assert piece_starts(made, passing, [], ahead=1) == []


def test_what_is_kept_of_more_microbatches_makes_pieces_longer() -> None:
    made = [MEGA] * 64
    counts = [len(piece_starts(made, [0, *made[1:]], range(1, 64), ahead)) for ahead in (1, 4, 100)]
    assert counts[0] > counts[1] > counts[2] == 0


def test_small_values_are_not_worth_a_piece() -> None:
    small = [PIECE_BYTES // 100] * 64
    assert piece_starts(small, small, range(1, 64), ahead=1) == []


# ---------------------------------------------------------------------------------------- nothing is done twice


class Hard(nn.Module):
    """Draws, moves statistics, counts in a buffer that it uses, and changes what a product gave in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.4)) for _ in "abc")
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)  # type: ignore[operator, union-attr]
        x = self.norm(self.enter(x)) * (self.calls + 1.0)  # type: ignore[operator]
        for layer in self.more:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("how", ["selective", "full"])
def test_gradients_buffers_and_generators_are_those_of_keeping_everything(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", -(2**30))  # as many pieces as there can be
    torch.manual_seed(3)
    batches = [torch.randn(5, 6, dtype=torch.float64) for _ in range(3)]
    found = []
    for chosen in ("none", how):
        torch.manual_seed(4)
        model = Hard().double()
        portion = program_of(model, batches[0], chosen).portions[0]
        assert portion.num_pieces == 0 if chosen == "none" else portion.num_pieces > 4
        torch.manual_seed(5)
        outputs = [once(portion, x).square().sum() for x in batches]  # several are under way, as in a pipeline
        for output in outputs:
            output.backward()
        left = [torch.rand(3), *(buffer.clone() for buffer in model.buffers())]
        found.append([*(output.detach() for output in outputs), *gradients(model), *left])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("how", "ahead", "more"), [("none", 1, 0), ("selective", 99, 0), ("full", 1, 0), ("full", 99, 4)]
)
def test_sums_of_several_ranks_are_kept_or_added_up_once_more(how: str, ahead: int, more: int) -> None:
    """Of the two blocks' four sums those again that something behind them in their piece needs: ``full`` cuts behind
    each, but where it has no room for pieces."""
    torch.manual_seed(0)
    model = load_task(GPT, {"depth": 2, "width": 64, "heads": 2, "context": 64}).model()
    x, members = torch.randint(256, (32, 64)), Counting(2)
    portion = program_of(model, x, how, members, ahead=ahead).portions[0]
    once(portion, x).sum().backward()  # the first time each piece is proved
    for _ in range(2):
        members.asked = 0
        output = once(portion, x)
        assert members.asked == 4
        output.sum().backward()
        assert members.asked == 4 + 4 + more, "backward adds up four gradients"


@pytest.mark.parametrize("how", ["selective", "full"])
def test_weight_gradients_can_be_put_off_all_the_same(how: str) -> None:
    torch.manual_seed(0)
    model = load_task(GPT, {"depth": 2, "width": 32, "heads": 2, "context": 16}).model().double()
    x, found = torch.randint(256, (4, 16)), []
    for chosen in ("none", how):
        later = Deferred()
        portion = program_of(model, x, chosen, later=later).portions[0]
        loss = once(portion, x).square().sum()
        put_off = later.collect(loss.backward)
        assert len(put_off) > 8
        work_off(put_off)
        found.append(gradients(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Looking:
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, stage: int, microbatch: int, program: Program, given: Sequence[Tensor]) -> None:
        pass

    def see(self, node: fx.Node, value: Any, arrived: bool) -> None:
        self.seen.append(node.name)


def test_who_looks_on_sees_each_operation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", -(2**30))
    x, shown = torch.randn(5, 6, dtype=torch.float64), []
    for how in ("none", "full"):
        portion, looking = program_of(Hard().double(), x, how).portions[0], Looking()
        portion.run([x], [], looking).output.sum().backward()
        shown.append(sorted(looking.seen))
    assert shown[0] == shown[1] and len(set(shown[0])) == len(shown[0]) > 20


# ------------------------------------------------------------------------------------------------ what is kept


def kept(how: str, size: int, microbatches: int) -> tuple[int, int]:
    """Bytes alive after forward of so many microbatches, and the most there ever are."""
    torch.manual_seed(0)
    model = load_task(GPT, {"depth": 6, "width": 64, "heads": 4, "context": 64}).model()
    x = torch.randint(256, (8, 64))
    program = program_of(model, x, how, Counting(size), ahead=microbatches)
    portion = program.portions[0]
    for _ in range(2):  # the first time each piece is proved, and gradients are new
        with LiveBytes() as live:
            losses = [once(portion, x).logsumexp(-1).sum() for _ in range(microbatches)]
            alive = live.now
            for loss in losses:
                loss.backward()
            del losses, loss
    return alive, live.peak


@pytest.mark.parametrize("size", [1, 2])
def test_full_keeps_little_and_selective_lies_between(size: int) -> None:
    found: dict[str, Sequence[Any]] = {how: kept(how, size, 2) for how in ("none", "selective", "full")}
    for at in (0, 1):
        none, selective, full = (found[how][at] for how in ("none", "selective", "full"))
        assert full < 0.2 * none and selective < 0.8 * none, found
