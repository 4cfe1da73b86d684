"""What metrics() and summarize() may return, and what is said where they return something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stretto.best import BestSoFar
from stretto.errors import RecipeError, TaskError
from stretto.metrics import check_metrics, numbers, ratios
from stretto.recipe import Recipe


def test_pairs_of_any_shape_and_rows_are_taken() -> None:
    found = check_metrics({"a": (torch.ones(2, 2), 3), "b": numpy.arange(4), "c": [1.5, torch.tensor(2)]})
    (matrix, count), rows, pair = found["a"], found["b"], found["c"]
    assert isinstance(rows, torch.Tensor) and rows.tolist() == [0, 1, 2, 3]
    assert (matrix.shape, int(count)) == ((2, 2), 3)
    assert [float(part) for part in pair] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"a": torch.tensor(1.0)}, r"metrics\(\)\['a'\] returned one number; return the pair"),
        ({"a": numpy.float64(1.0)}, "must be the pair .* got float64"),
        ({"a": (1, 2, 3)}, "must be the pair .* got tuple"),
        ({"a": 0.5}, "must be the pair .* got float"),
        ({"loss": (1, 2)}, "give it another name"),
        ((1, 2), "must return a dict .* got tuple"),
    ],
)
def test_what_is_no_metric_is_one_line(found: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        check_metrics(found)
    assert "\n" not in str(caught.value)


def test_only_pairs_of_numbers_have_a_ratio_of_their_own() -> None:
    assert ratios({"a": (3.0, 4.0)}) == {"a": 0.75}
    assert numpy.isnan(ratios({"a": (3.0, 0.0)})["a"])
    for more in (torch.ones(3), (torch.ones(3), 2.0), (2.0, torch.ones(3))):
        with pytest.raises(TaskError, match=r"metrics\(\)\['b'\] .* write summarize\(totals\)"):
            ratios({"a": (3.0, 4.0), "b": more})


def test_what_is_shown_is_plain_numbers() -> None:
    found = numbers({"a": torch.tensor(0.5), "b": numpy.float32(2), "c": 3})
    assert found == {"a": 0.5, "b": 2.0, "c": 3.0}
    assert all(type(value) is float for value in found.values())
    for wrong in (torch.ones(2), None, "high", [1.0]):
        with pytest.raises(TaskError, match=r"summarize\(\)\['a'\] must be one number"):
            numbers({"a": wrong})
    with pytest.raises(TaskError, match="must return a dict"):
        numbers(0.5)


@pytest.mark.parametrize(
    ("best", "read"),
    [
        ("highest accuracy", ("highest", "accuracy")),
        ("lowest bits per byte", ("lowest", "bits per byte")),
        ("loss", ("lowest", "loss")),
        (None, None),
    ],
)
def test_the_best_is_said_in_two_words(best: str | None, read: tuple[str, str] | None) -> None:
    assert Recipe(batch=1, steps=1, best=best).best_order_and_metric == read


@pytest.mark.parametrize(
    ("best", "says"),
    [
        ("accuracy", "say which way is better: best='highest accuracy' or best='lowest accuracy'"),
        ("higest accuracy", "did you mean 'highest'"),
        ("highest", "must be 'highest METRIC' or 'lowest METRIC', got 'highest'"),
        ("", "must be 'highest METRIC'"),
        (3, "say which way is better"),
    ],
)
def test_a_best_that_could_mean_the_worst_is_refused(best: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        Recipe(batch=1, steps=1, best=best)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_is_said() -> None:
    assert Recipe(batch=1, steps=1).without_effect(["train"]) == []
    assert Recipe(batch=1, steps=1, eval_every=2, best="loss").without_effect(["train", "val"]) == []
    assert "named 'val'" in Recipe(batch=1, steps=1, eval_every=2).without_effect(["train"])[0]
    assert "at the end only" in Recipe(batch=1, steps=1, best="loss").without_effect(["train", "val"])[0]


def test_a_best_of_another_metric_counts_no_more(tmp_path: Path) -> None:
    def follow(best: str) -> BestSoFar:
        return BestSoFar(Recipe(batch=1, steps=1, best=best), tmp_path, ["val"])

    first = follow("highest a")
    first.look(3, {"a": 2.0})
    assert first.due(3) and first.pin() == 3 and not first.due(3)
    record = first.to_json()
    for other in ("lowest a", "highest b"):
        later = follow(other)
        later.resume(record, writes=True)
        assert later.to_json() is None
    same = follow("highest a")
    same.resume(record, writes=True)
    assert same.to_json() == record
    assert not (tmp_path / "best.json").exists(), "its checkpoint is not there"
    same.look(4, {"a": 2.0})
    assert not same.due(4), "only what is better is the best"
