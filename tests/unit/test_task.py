"""Tasks: how they are found, given their settings, and told what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.errors import TaskError
from stretto.task import check_pair, default_inputs, load_task

GOOD = """
import torch
from torch import nn
from stretto.recipe import Recipe
def model(width: int = 4, name: str = "a"): return nn.Linear(2, width)
def data(points: int = 8, split=None): return torch.utils.data.TensorDataset(torch.ones(points, 2))
def loss(output, batch, power: float = 2.0): return output.pow(power).sum(), torch.tensor(float(len(output)))
def optimizer(params, lr: float = 1e-3, betas: tuple = (0.9, 0.99)): return torch.optim.Adam(params, lr=lr, betas=betas)
def recipe(batch: int = 4, steps: int = 3): return Recipe(batch=batch, steps=steps, clip=1.0)
"""


def write(folder: Path, text: str = GOOD, name: str = "task.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_settings_reach_functions_and_recipe(tmp_path: Path) -> None:
    write(tmp_path)
    sets = {
        "width": "7",
        "lr": "3e-4",
        "steps": "9",
        "precision": "fp64",
        "name": "b",
        "betas": "[0.5, 0.6]",
        "clip": "null",
    }
    task = load_task(tmp_path, sets)
    assert task.model().weight.shape == (7, 2)
    assert task.settings["lr"].value == 3e-4 and task.settings["lr"].origin == "--set"
    assert task.settings["betas"].value == (0.5, 0.6)
    assert (task.recipe.steps, task.recipe.precision, task.recipe.clip, task.recipe.batch) == (9, "fp64", None, 4)
    assert task.recipe_origins["steps"] == "--set" and task.recipe_origins["clip"] == "--set"
    assert task.recipe_origins["seed"] == "default"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ({"widht": "7"}, "did you mean 'width'"),
        ({"width": "wide"}, "expected int like 4"),
        ({"width": "2.5"}, "expected int"),
        ({"lr": "fast"}, "expected float"),
        ({"width": "[1"}, "--set width"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, sets: dict[str, str], says: str) -> None:
    write(tmp_path)
    with pytest.raises(TaskError, match=says.replace("[", r"\[")) as caught:
        load_task(tmp_path, sets)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("def loss", "def lost").replace("def data", "def date"))
    with pytest.raises(TaskError, match=r"data\(\), loss\(\)"):
        load_task(tmp_path)
    with pytest.raises(TaskError, match=r"did you mean 'task.py'"):
        load_task(tmp_path / "tsak.py")
    with pytest.raises(TaskError, match="line 2"):
        load_task(write(tmp_path, "x = 1\ndef (:\n", "broken.py"))


def test_a_bare_scalar_is_refused_with_the_way_to_write_the_pair() -> None:
    with pytest.raises(TaskError, match="mean of means"):
        check_pair(torch.tensor(1.0), "loss")
    with pytest.raises(TaskError, match=r"call .sum\(\)"):
        check_pair((torch.ones(3), torch.tensor(3.0)), "loss")
    with pytest.raises(TaskError, match="the pair"):
        check_pair((torch.tensor(1.0),), "loss")
    total, weight = check_pair((torch.tensor(1.0), 4), "loss")
    assert (float(total), float(weight)) == (1.0, 4.0)


def test_inputs_by_default() -> None:
    def forward(input_ids: object, mask: object = None, labels: object = None, **rest: object) -> None: ...

    assert default_inputs((1, 2), forward) == ((1,), {})
    batch = {"input_ids": 1, "labels": 2, "mask": 3, "other": 4}
    assert default_inputs(batch, forward) == ((), {"input_ids": 1, "mask": 3})
    with pytest.raises(TaskError, match="write inputs"):
        default_inputs((1, 2, 3), forward)
    with pytest.raises(TaskError, match="none of the batch's entries"):
        default_inputs({"y": 1}, forward)


def test_a_dataset_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("return torch.utils.data.TensorDataset(torch.ones(points, 2))", "return iter([1])"))
    with pytest.raises(TaskError, match="map-style"):
        load_task(tmp_path).data()
    write(
        tmp_path, GOOD.replace("return torch.utils.data.TensorDataset(torch.ones(points, 2))", "return {'test': [1]}")
    )
    with pytest.raises(TaskError, match="one must be named 'train'"):
        load_task(tmp_path).data()
