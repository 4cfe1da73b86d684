"""Whether a traced graph is the model: what it can't have in it is refused by name; what it has is let through."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from stretto.errors import Refused
from stretto.graph.trace import trace
from stretto.parallel._base import Example, Roots
from stretto.parallel.faithful import unlike

WIDTH = 6


class Reversed(torch.autograd.Function):
    """The gradient turned round, as domain adaptation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * gradient


class Odd(nn.Module):
    """[batch, 6] to [batch]; ``kind`` says what is odd."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.cache: Tensor | None = None
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5) if kind == "max_norm" else None
        if kind == "module hook":
            self.second.register_full_backward_hook(lambda _, given, __: tuple(0.3 * g for g in given))
        if kind == "spectral":
            self.second = nn.utils.parametrizations.spectral_norm(self.second)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        if self.kind == "function":
            h = Reversed.apply(h)  # type: ignore[no-untyped-call]
        if self.kind == "no number":
            h = h * float("nan")
        if self.kind == "branch" and h.sum() > 0:
            h = h * 2
        if self.kind == "tensor hook" and h.requires_grad:
            h.register_hook(lambda gradient: 0.1 * gradient)
        if self.kind == "count":
            self.calls += 1
            h = h * (1 + self.calls)
        if self.kind == "cache":
            self.cache = torch.arange(WIDTH, dtype=h.dtype) if self.cache is None else self.cache
            h = h + self.cache
        if self.kind == "running":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.mean
        if self.kind == "teacher":
            with torch.no_grad():
                h = h + F.dropout(self.second(h), 0.4, self.training)
        if self.table is not None:
            h = h + self.table(x[:, 0].abs().long() % 5)
        if self.kind.startswith("checkpoint"):
            h = checkpoint(self.second, h, use_reentrant=self.kind.endswith("reentrant"))
        else:
            h = F.dropout(self.second(h), 0.2, self.training)
        return self.last(torch.tanh(h)).squeeze(-1)


def said(module: nn.Module, free: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[str, str]:
    torch.manual_seed(3)
    module = module.to(dtype).train()
    x = torch.randn(5, WIDTH, dtype=dtype)
    traced = trace(copy.deepcopy(module), (x,), {})
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def loss(output: Tensor) -> Roots:
        total = output.square().sum()
        return ([total], [torch.ones_like(total)]) if total.requires_grad else ([], [])

    example = Example(((x,), {}), loss)
    drawn = torch.get_rng_state()
    found = unlike(traced, copy.deepcopy(module), module, example, free)
    assert torch.equal(drawn, torch.get_rng_state()), "the generators are as they were"
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.state_dict().items()), "and so is the model"
    return found


@pytest.mark.parametrize("kind", ["plain", "cache", "running", "teacher", "spectral", "checkpoint", "no number"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_the_graph_has_is_let_through(kind: str, dtype: torch.dtype) -> None:
    if (kind, dtype) == ("spectral", torch.bfloat16):
        pytest.skip("torch computes no spectral norm in bfloat16")
    assert said(Odd(kind), dtype=dtype) == ("", "")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("function", r"the gradient of first\.weight differs.*autograd\.Function"),
        ("tensor hook", r"the gradient of first\.weight differs"),
        ("module hook", r"the gradient of first\.weight differs"),
        ("checkpoint, reentrant", r"the gradient of first\.weight differs"),
        ("count", r"called again, .* it gives something else"),
    ],
)
def test_what_the_graph_lacks_is_refused(kind: str, why: str) -> None:
    found, note = said(Odd(kind))
    assert re.search(why, found), found
    assert not note


def test_what_the_memory_doesn_t_allow_is_told() -> None:
    why, note = said(Odd("function"), free=100)
    assert not why and "was not checked" in note and "stretto verify" in note


class Held:
    """An output of a type that nobody knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@dataclass
class Known:
    """An output that can be looked into."""

    logits: Tensor
    name: str = "known"


class Wrapped(nn.Module):
    """What it is called with, in something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, 1)

    def forward(self, x: Any, scale: Any = None) -> Any:
        if self.kind == "changes its input":
            x.mul_(2)
        out = self.layer(x if isinstance(x, Tensor) else x.data)
        return {"held": Held, "known": Known}.get(self.kind, lambda value: value)(out)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("held", "returns a Held, into which a trace can't look"),
        ("changes its input", "changes its input in place"),
        ("packed", "called with a PackedSequence, into which a trace can't look"),
    ],
)
def test_what_a_trace_would_take_for_a_constant_is_refused(kind: str, why: str) -> None:
    x = torch.randn(4, WIDTH)
    with pytest.raises(Refused, match=why):
        trace(Wrapped(kind), (pack_sequence([x]) if kind == "packed" else x,), {})


def test_what_can_be_looked_into_is_traced() -> None:
    found = trace(Wrapped("known"), (torch.randn(4, WIDTH),), {"scale": 2})
    assert isinstance(found.output, Known) and found.output.name == "known"


def test_a_branch_on_the_data_is_refused_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match=r"depends on the numbers that it is given \(test_faithful.py, line \d+: if self"):
        trace(Odd("branch").train(), (torch.randn(4, WIDTH),), {})
    assert not capsys.readouterr().out, "torch prints pages of its graph"


def test_a_parameter_that_forward_changes_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"changes the parameter table\.weight in place"):
        trace(Odd("max_norm").train(), (torch.randn(4, WIDTH),), {})
