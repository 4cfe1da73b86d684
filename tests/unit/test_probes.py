"""The optimizer probe tells element-by-element optimizers from those that look at whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.errors import ProbeFailed
from stretto.probes import optimizer_cut_error
from stretto.task import Params

ELEMENTWISE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
    ("ASGD", {}),
)


def factory(name: str, **settings: Any) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(list(params), **settings)


@pytest.mark.parametrize(("name", "settings"), ELEMENTWISE)
def test_an_element_by_element_optimizer_may_be_cut(name: str, settings: dict[str, Any]) -> None:
    assert optimizer_cut_error(factory(name, **settings)) == 0.0


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_one_that_looks_at_whole_tensors_may_not(name: str) -> None:
    assert optimizer_cut_error(factory(name)) > 1e-4


def test_a_factory_that_needs_the_model_is_not_judged() -> None:
    with pytest.raises(ProbeFailed):
        optimizer_cut_error(lambda params: torch.optim.SGD([dict(params.named())["head.weight"]], lr=0.1))


def test_the_probe_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    optimizer_cut_error(lambda params: torch.optim.SGD(list(params), lr=float(torch.rand(()))))
    assert torch.equal(torch.get_rng_state(), before)
