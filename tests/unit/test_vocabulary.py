"""Tables and heads cut by vocabulary: what is cut, what isn't and why; and places in a part."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.comm.members import Broken, Members
from stretto.graph.cut import plan_cut, report
from stretto.graph.rules import read, whole_output
from stretto.graph.stages import work_of
from stretto.graph.trace import Scoring, trace
from stretto.parallel import Example
from stretto.parallel.faithful import unlike
from stretto.parallel.scored import unseen
from stretto.parallel.spread import CrossEntropy, Rows, places_of
from stretto.precision import computing

ALONE = Members(0, 1, torch.device("cpu"), None, Broken())
ROOT = Path(__file__).resolve().parents[2]


def task() -> Any:
    spec = importlib.util.spec_from_file_location("word_losses", ROOT / "tests" / "tasks" / "word_losses.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def said(model: nn.Module, words: Tensor, terms: Any) -> dict[str, str]:
    traced = trace(model, (words,), {}, Scoring(terms, {"next": words}))
    return dict(report(plan_cut(read(traced), traced, 2), traced))


KINDS = (
    *("gather", "along", "logsumexp", "indexed", "nll", "weighted", "smooth", "largest", "mean", "entropy"),
    *("averaged", "terms", "plain"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_loss_lets_the_vocabulary_be_cut(kind: str, tied: bool) -> None:
    words = task()
    found = said(words.model(tied), torch.randint(0, 13, (2, 5)), lambda o, b: words.loss(o, b, kind))
    heads = [name for name in ("table.weight", "head.weight", "head.bias") if name in found]
    assert {found[name] for name in heads} == {"dimension 0 cut along an axis of 13"}, found
    assert found["up.weight"] == "dimension 0 cut along an axis of 12", "and the network as without a loss"
    assert "norm runs over it" in found["norm.weight"]


def test_without_the_loss_the_head_is_whole_and_the_reason_is_told() -> None:
    words = task()
    traced = trace(words.model(), (torch.randint(0, 13, (2, 5)),), {})
    found = report(plan_cut(read(traced, whole_output("why not")), traced, 2), traced)
    assert "it is in the model's output (why not)" in found["head.weight"]
    assert found["table.weight"].startswith("dimension 0 cut")


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (lambda o, b: {"loss": o.argmax(-1).sum() + o.sum()}, "argmax needs all of it"),
        (lambda o, b: {"loss": F.cross_entropy(o[:, 0], o[:, 1].softmax(-1))}, "cross_entropy_loss needs all of it"),
        (lambda o, b: {"loss": o.amin(-1).sum()}, "amin runs over it"),
    ],
)
def test_what_has_no_rule_leaves_the_head_whole(terms: Any, why: str) -> None:
    assert why in said(task().model(), torch.randint(0, 13, (2, 5)), terms)["head.weight"]


def example() -> dict[str, Tensor]:
    return {"next": torch.randint(0, 13, (2, 5))}


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(torch.float32).sin().to(x.dtype))


class Positions(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8, **options), nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.words(words) + self.places(torch.arange(words.shape[1])))


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_tables_that_are_not_cut(option: str) -> None:
    words = torch.randint(0, 13, (2, 5))
    terms = lambda o, b: {"loss": o.square().sum()}  # noqa: E731
    found = said(Positions(**{option: True}), words, terms)
    assert f"an embedding with {option}=True looks its rows up" in found["words.weight"]
    assert "looks the same rows up whatever the input" in found["places.weight"]
    assert said(Positions(), words, terms)["words.weight"].startswith("dimension 0 cut")


def test_places_in_pieces_and_what_is_no_place_at_all() -> None:
    places, inside = places_of(torch.tensor([0, 2, 5, 6, 7, -1, 8]), [(2, 4), (6, 8)], 8)
    assert places.tolist() == [0, 0, 0, 2, 3, -1, -1]
    assert inside.tolist() == [False, True, False, True, True, False, False]


@pytest.mark.parametrize("number", [13, -1])
def test_a_word_or_class_that_there_isn_t_is_refused_as_by_torch(number: int) -> None:
    """Zeros on every rank would be no row of the table."""
    with pytest.raises(IndexError):
        Rows()(torch.randn(6, 4), torch.tensor([number]), -1, [(0, 6)], 13)
    with pytest.raises((IndexError, RuntimeError)):
        CrossEntropy(ALONE)(torch.randn(1, 6), torch.tensor([number]), None, True, 2, -100, 0.0, 1, [(0, 6)], 13)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 2, 5, dtype=torch.float64)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 2), (5,)])
def test_cross_entropy_is_torch_s(
    weight: Tensor | None, smoothing: float, reduction: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dim = 0 if len(shape) == 1 else 1
    target = torch.randint(0, 5, [*shape[:dim], *shape[dim + 1 :]])
    if len(shape) > 1:
        target[0] = 3
    options: dict[str, Any] = {"weight": weight, "ignore_index": 3, "label_smoothing": smoothing}
    expected = F.cross_entropy(x, target, reduction=reduction, **options)
    number = ("none", "mean", "sum").index(reduction)
    found = CrossEntropy(ALONE)(x, target, weight, True, number, 3, smoothing, dim, [(0, 5)], 5)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13, equal_nan=True)
    for loss in (found, expected):
        x.grad, kept = None, x.grad
        loss.nan_to_num().sum().backward()
    assert kept is not None and x.grad is not None
    torch.testing.assert_close(kept, x.grad, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_no_stage_begins_inside_the_loss_and_none_is_the_loss_alone() -> None:
    words, model = task(), task().model()
    traced = trace(model, (torch.randint(0, 13, (2, 5)),), {}, Scoring(lambda o, b: words.loss(o, b), example()))
    work = work_of(traced, {name: True for name, _ in model.named_parameters()})
    assert not any(work.nodes[place] in (traced.loss or ()) for place in work.edges)
    assert str(work.nodes[max(work.edges)]) == "linear_2", "the head and the loss are one stage at least"


def test_in_float64_a_batch_keeps_its_types_and_requests_are_widened() -> None:
    """A float32 weight of the batch is float32 for the loss, and a norm's cast to float32 doesn't round."""
    model = Narrow().double()
    x, batch = torch.randn(3, 4, dtype=torch.float64), {"weights": torch.rand(3, 5)}
    seen: list[torch.dtype] = []

    def terms(output: Tensor, given: Any) -> dict[str, tuple[Tensor, Tensor]]:
        seen.append(given["weights"].dtype)
        return {"loss": ((output * given["weights"].to(output.dtype)).sum(), given["weights"].sum())}

    surround = partial(computing, "fp64")
    scoring = Scoring(terms, batch)
    traced = trace(model, (x,), {}, scoring, surround)
    assert set(seen) == {torch.float32}
    casts = [node for node in traced.graph.graph.nodes if "float32" in str(node.args) or "_to_copy" in str(node.target)]
    assert all(node.meta["val"].dtype is torch.float64 for node in casts)
    with surround():
        example = Example(((x,), {}), lambda output: ([output.sum()], [torch.ones(())]), scoring)
        assert unlike(traced, copy.deepcopy(model), model, example, None) == ("", "")


def test_what_a_trace_would_take_for_a_constant_is_named() -> None:
    x = torch.zeros(2)
    assert not unseen({"a": [x, None], "b": (x,)})
    assert unseen([x, {"text": ["one"]}]).startswith("batch[1]['text'][0] is a str, which a trace of the loss would")
    assert unseen((x, 3)).startswith("batch[1] is a int")
