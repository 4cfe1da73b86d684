"""The optimizer probe tells element-by-element optimizers from those that look at whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.errors import ProbeFailed
from stretto.plan import Plan
from stretto.probes import Findings, optimizer_reach, refusal
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
    assert optimizer_reach(factory(name, **settings)) == ("element", 0.0)


class RowWise(torch.optim.SGD):
    """Steps of length lr along each row's direction: halves by rows don't show it, halves by columns do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm(dim=-1, keepdim=True))
        super().step()


class TrustRatio(torch.optim.SGD):
    """LAMB's way: the step is as long as the tensor is large."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        super().step()


class ClipsInside(torch.optim.SGD):
    """Clips by the norm over all parameters, where it is long."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 50.0)
        super().step()


class EstimatesItsStep(torch.optim.SGD):
    """D-adaptation's way: one step size for all, which only grows once it is seen to be too small."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.start = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]
        self.size, self.along, self.length = 1e-6, 0.0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, starts in zip(self.param_groups, self.start, strict=True):
            for parameter, start in zip(group["params"], starts, strict=True):
                self.along += float((parameter.grad * (start - parameter)).sum())
                self.length += float(parameter.grad.abs().sum())
                parameter.add_(parameter.grad.sign(), alpha=-self.size)
        self.size = max(self.size, self.along / self.length)


@pytest.mark.parametrize("made", ["Adafactor", "Muon", RowWise, TrustRatio])
def test_one_that_looks_at_whole_tensors_may_not(made: Any) -> None:
    reach = optimizer_reach(factory(made) if isinstance(made, str) else lambda params: made(list(params), lr=0.1))
    assert reach.kind == "tensor" and reach.error > 1e-4
    found = Findings(reach=reach.kind, reach_error=reach.error)
    said = refusal(found, Plan.parse("dp=2,zero=3"))
    assert said is not None and "looks at whole tensors" in said and "zero=2" in said
    assert refusal(found, Plan.parse("dp=2")) is None
    assert refusal(found, Plan.parse("dp=1,zero=3")) is None


@pytest.mark.parametrize("made", [ClipsInside, EstimatesItsStep])
def test_one_whose_parameters_influence_each_other_needs_them_all(made: Any) -> None:
    reach = optimizer_reach(lambda params: made(list(params), lr=0.1))
    assert reach.kind == "all" and reach.error > 1e-4
    said = refusal(Findings(reach=reach.kind, reach_error=reach.error), Plan.parse("dp=2,zero=3"))
    assert said is not None and "from other parameters too" in said


def test_groups_by_shape_don_t_hide_an_element_by_element_optimizer() -> None:
    def grouped(params: Params) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1}]
        return torch.optim.AdamW([*groups, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}])

    assert optimizer_reach(grouped) == ("element", 0.0)


def test_a_factory_that_needs_the_model_is_not_judged() -> None:
    with pytest.raises(ProbeFailed):
        optimizer_reach(lambda params: torch.optim.SGD([dict(params.named())["head.weight"]], lr=0.1))


def test_the_probe_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    optimizer_reach(lambda params: torch.optim.SGD(list(params), lr=float(torch.rand(()))))
    assert torch.equal(torch.get_rng_state(), before)


def test_groups_by_place_are_no_coupling() -> None:
    """A factory may give each parameter a rate by its place; that alone ties none to another."""

    def factory(params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * (place + 1)} for place, p in enumerate(params)])

    assert optimizer_reach(factory) == ("element", 0.0)
