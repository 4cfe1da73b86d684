"""What is computed again, by which rule, and how much less is kept; tests/parity proves that it is exact."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import PlanError, Refused
from stretto.mistakes import second_forward
from stretto.parallel._base import Manner
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.kept import Kept, keeps
from stretto.parallel.recompute import Recomputed
from stretto.plan import Plan
from stretto.task import load_task
from stretto.testing.live import LiveBytes

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"


class Block(nn.Module):
    """A layer with layers of its own; notes how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.inner(value)
        return out


class Lists(nn.Module):
    """Two blocks in a list, and a Sequential beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def flat(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) if index % 2 else nn.Tanh() for index in range(count)))


def recomputed(module: nn.Module, how: str = "full") -> Recomputed:
    norm = GlobalBatchNorm(module, None)  # type: ignore[arg-type]  # no BatchNorm here, so none to talk with
    return Recomputed(module, Manner(recompute=how), norm)


def changed(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if "forward" in vars(child)]


def runs(module: nn.Module) -> dict[str, int]:
    """How often the forward of each part of the model runs in one step after the first."""
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    module(torch.ones(2, 3)).sum().backward()
    for name, child in module.named_modules():
        child.register_forward_pre_hook(count(name))
    module(torch.ones(2, 3)).sum().backward()
    return counts


# --------------------------------------------------------------------------------------------------- the plan


def test_a_plan_says_what_is_computed_again() -> None:
    plan = Plan.parse("dp=2, zero=3, recompute = full")
    assert plan == Plan(dp=2, zero=3, recompute="full") != Plan(dp=2, zero=3)
    assert str(plan) == "dp=2,zero=3,recompute=full" and Plan.parse(str(plan)) == plan
    assert str(Plan.parse("recompute=none")) == "dp=1" and Plan.parse("recompute=none") == Plan()
    assert str(plan.on(3)) == "dp=3,zero=3,recompute=full"
    assert Plan.parse("recompute=selective", workers=2) == Plan(dp=2, recompute="selective")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recompute=ful", "none, selective or full, got 'ful'; did you mean 'full'"),
        ("recompute", "none, selective or full, got ''"),
        ("recompute=2", "none, selective or full, got '2'"),
        ("recompute=full,recompute=none", "given twice"),
        ("recomputes=full", "did you mean 'recompute'"),
    ],
)
def test_a_way_that_there_is_not_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(text)


# ---------------------------------------------------------------------------------------------- what is found


def test_layers_of_lists_are_computed_again_and_nothing_beside_or_inside_them() -> None:
    model = Lists()
    held = recomputed(model)
    assert changed(model) == ["blocks.0", "blocks.1"] and held.notes == ()
    counts = runs(model)
    assert counts["blocks.0.inner"] == 2 and counts["blocks.1.inner.0"] == 2, "once forward, once backward"
    assert counts["blocks.0"] == counts["stem"] == counts["stem.0"] == 1
    held.remove()
    assert changed(model) == [] and runs(model)["blocks.0.inner"] == 1


def test_without_a_list_blocks_of_a_sequential_are_computed_again() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Block(), nn.Tanh(), Block())
    assert recomputed(model).notes == () and changed(model) == ["1", "3"]
    assert runs(model)["1.inner"] == 2
    nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(nn.Linear(3, 3)), flat(4))
    recomputed(nested)
    assert changed(nested) == ["0.0", "0.1", "1", "2"], "as fine as there are blocks"


def test_a_sequential_of_single_layers_is_computed_again_in_pieces() -> None:
    model = nn.Sequential(nn.Linear(3, 3), flat(9))
    held = recomputed(model, "selective")
    assert changed(model) == ["1"]
    assert held.notes == ("recompute=selective: the Sequential 1 is computed again in 3 pieces",)
    assert [runs(model)[f"1.{index}"] for index in range(9)] == [2] * 9
    assert "of 4" in recomputed(flat(3)).notes[0] and not recomputed(flat(4)).notes[0].count("inactive")


def test_what_has_nothing_to_compute_again_says_so() -> None:
    for model in (nn.Linear(3, 3), flat(3), nn.LSTM(3, 3), nn.Sequential(Block())[0].inner[0]):
        (note,) = recomputed(model).notes
        assert note.startswith("recompute=full is inactive: ") and changed(model) == []


def test_none_changes_nothing() -> None:
    model = Lists()
    assert recomputed(model, "none").notes == () and changed(model) == []


def test_a_sequential_is_still_called_as_it_says() -> None:
    model = flat(4)
    before = inspect.signature(model.forward)
    recomputed(model)
    assert inspect.signature(model.forward) == before


def test_without_gradients_nothing_runs_twice() -> None:
    model = Lists()
    recomputed(model)
    counts = [0]
    model.blocks[0].inner.register_forward_pre_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert counts == [1]


def draw_in_backward(_: nn.Module, arguments: tuple[Tensor]) -> None:
    arguments[0].register_hook(lambda gradient: gradient * torch.rand_like(gradient))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_drawn_in_backward_is_what_it_would_be_without(how: str) -> None:
    """A hook draws after the second forwards of later layers; their dropout must leave no trace in the generator."""
    gradients = []
    for chosen in ("none", how):
        torch.manual_seed(0)
        model = Lists()
        for block in model.blocks:
            block.inner.append(nn.Dropout(0.5))  # type: ignore[operator, union-attr]
        recomputed(model, chosen)
        model.blocks[0].register_forward_pre_hook(draw_in_backward)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            model(torch.ones(2, 3)).sum().backward()
        gradients.append(next(model.stem.parameters()).grad)
    assert torch.equal(*gradients) and gradients[0].any()


# ------------------------------------------------------------------------------------------- what it is worth


@pytest.fixture
def bytes_kept() -> Iterator[dict[str, int]]:
    """What is alive between forward and backward of one small GPT."""
    task = load_task(GPT, {"depth": 4, "width": 32, "heads": 4, "context": 32})
    found = {}
    for how in ("none", "selective", "full"):
        model = task.model()
        recomputed(model, how)
        for _ in range(2):  # the first time each layer is proved
            with LiveBytes() as live:
                output = model(torch.arange(64).view(2, 32)).sum()
                found[how] = live.now
                output.backward()
    yield found


def test_full_keeps_little_and_selective_lies_between(bytes_kept: dict[str, int]) -> None:
    """Of a layer's activations full keeps one, and selective the matrix products; the head's are kept by all."""
    assert bytes_kept["full"] < 0.15 * bytes_kept["none"]
    assert 0.4 * bytes_kept["none"] < bytes_kept["selective"] < 0.75 * bytes_kept["none"]


def test_live_bytes_counts_what_is_alive_and_lets_go() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(10)
        view = kept.view(2, 5)
        more = kept + 1
        assert live.now == 80 and live.peak == 80
        del more
        assert live.now == 40 and view.shape == (2, 5)
        kept.add_(1)
        assert live.now == 40 and live.peak == 80


def test_selective_keeps_no_operator_that_draws() -> None:
    """Its generator would stay behind when it isn't run again, and what follows would draw other numbers."""
    aten, q = torch.ops.aten, torch.zeros(1, 1, 2, 2)
    for operator in (aten.mm.default, aten.addmm.default, aten.convolution.default):
        assert keeps(operator, (q, q, q), {})
    assert not keeps(aten.gelu.default, (q,), {}) and not keeps(aten.add_.Tensor, (q, q), {})
    flash = aten._scaled_dot_product_flash_attention.default
    assert keeps(flash, (q, q, q), {}) and keeps(flash, (q, q, q, 0.0), {})
    assert not keeps(flash, (q, q, q, 0.1), {}) and not keeps(flash, (q, q, q), {"dropout_p": 0.1})
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert keeps(efficient, (q, q, q, None, True), {}) and not keeps(efficient, (q, q, q, None, True, 0.1), {})


class Recurrent(nn.Module):
    """torch's own, in double precision, adds to what its matrix products gave."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Changing(nn.Module):
    """Changes a result of a matrix product, all of it or a view."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(3, 3, dtype=torch.float64), act

    def forward(self, x: Tensor) -> Tensor:
        product = self.inner(x)
        self.act(product)
        return product.sin()


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: Recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        lambda: Changing(torch.relu_),
        lambda: Changing(lambda product: product[:, 1:].mul_(3.0)),
        lambda: Changing(torch.no_grad()(lambda product: torch.exp(product, out=product))),
        lambda: Changing(lambda product: torch._foreach_mul_([product, product[:1]], 2.0)),
    ],
)
def test_selective_keeps_results_as_they_were_before_they_changed(make: Any) -> None:
    found = []
    for how in ("none", "selective"):
        torch.manual_seed(3)
        model = nn.Sequential(make(), make())
        held = recomputed(model, how)
        for _ in range(2):
            model.zero_grad()
            model(torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).sum().backward()
        held.remove()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and one.abs().max() > 1e-3 and torch.equal(one, other)


def test_what_is_kept_is_for_one_backward_and_for_the_same_operations() -> None:
    x, kept = torch.ones(2, 2), Kept()
    with kept.noting:
        product = x @ x
    with kept.replaying:
        assert (x @ x).data_ptr() == product.data_ptr()
        with pytest.raises(RuntimeError, match="other operations than the second forward asks for"):
            _ = x @ x
    with kept.replaying, pytest.raises(RuntimeError, match="for one backward"):
        _ = x @ x
    kept = Kept()
    with kept.noting:
        product = x @ x
    product.add_(1)
    says = "recompute=selective keeps a result that was changed in place after forward"
    with pytest.raises(Refused, match=says), second_forward("selective"), kept.replaying:
        _ = x @ x


# ------------------------------------------------------------------------------------------------ what is refused


class Twice(nn.Module):
    """Answers with what ``act`` makes of the number of calls so far."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.inner, self.act, self.calls = nn.Linear(3, 3), act, [0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.inner(x), x)
        return out


def in_a_list(act: Any) -> nn.Sequential:
    model = nn.Sequential(Twice(act), Twice(act))
    recomputed(model)
    return model


def test_a_layer_that_fails_the_second_time_is_refused_with_its_own_words() -> None:
    calls: list[int] = []

    def act(h: Tensor, _: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("once is enough")
        return h

    with pytest.raises(Refused, match=r"recompute=full: 0 fails when it is computed a second time \(once is enough\)"):
        in_a_list(act)(torch.ones(2, 3))


def test_a_small_difference_is_found_and_rounding_is_not() -> None:
    size = [1e-3]

    def act(h: Tensor, _: Tensor) -> Tensor:
        size[0] = -size[0]
        return h * (1 + size[0])

    with pytest.raises(Refused, match="answers otherwise"):
        in_a_list(act)(torch.ones(2, 3))
    size[0] = 1e-7
    in_a_list(act)(torch.ones(2, 3)).sum().backward()


def test_a_layer_that_takes_another_way_in_backward_is_refused() -> None:
    calls: list[int] = []

    def act(h: Tensor, _: Tensor) -> Tensor:
        calls.append(1)
        return (h if len(calls) <= 4 else h[:1]).tanh()

    out = in_a_list(act)(torch.ones(2, 3)).sum()
    says = "recompute=full: a layer can't be computed a second time in backward"
    with pytest.raises(Refused, match=says), second_forward("full"):
        out.backward()


def test_an_error_that_is_none_of_recomputation_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"), second_forward("none"):
        raise RuntimeError("torch.utils.checkpoint: of the user's own")
    with pytest.raises(RuntimeError, match="something else") as caught, second_forward("full"):
        raise RuntimeError("something else")
    assert not isinstance(caught.value, Refused)
