"""What workers that share one copy of the weights must bear: models with hardly anything to share, and those that write
where others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import LocalLauncher
from stretto.verify import PlanReport, verify

EDGES = Path(__file__).resolve().parents[1] / "tasks" / "edge_parts.py"
SEPARATE = "stretto.testing.conditions:separate_memory"
PLANS = ("dp=1,zero=3", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3,microbatches=2")


def proved(launcher: LocalLauncher, plans: tuple[str, ...], plant: str = "", **sets: str) -> tuple[PlanReport, ...]:
    return verify(EDGES, plans, sets, launcher=launcher, plant=plant or None).plans


def exact(reports: tuple[PlanReport, ...], bound: float = 1e-13) -> None:
    for report in reports:
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        figures = (report.loss_max_rel, report.grad_max_rel, report.weight_max_rel, report.state_max_rel)
        assert all((figure or 0) <= bound for figure in figures), report


@pytest.mark.parametrize(
    ("kind", "optim"),
    [
        ("scalar", "Adam"),
        ("sparse", "Adagrad"),
        *(pytest.param(kind, "Adam", marks=pytest.mark.matrix) for kind in ("tiny", "frozen", "threads")),
    ],
)
def test_hardly_anything_to_share_is_exact_on_few_and_many_workers(
    launcher: LocalLauncher, kind: str, optim: str
) -> None:
    """Three elements, one, none that lie together, or one small share that trains: on up to eight workers."""
    exact(proved(launcher, (*PLANS[-2:], "dp=8,zero=3"), kind=kind, optim=optim))
    exact(proved(launcher, PLANS[-2:], kind=kind, optim=optim, precision="bf16", steps="1"), 2e-6)


def test_an_optimizer_that_puts_new_tensors_in_place_of_the_old_is_exact(launcher: LocalLauncher) -> None:
    exact(proved(launcher, PLANS, optim="Rebinding"))
    exact(proved(launcher, ("dp=2,zero=3",), SEPARATE, optim="Rebinding"))


@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_that_gives_a_parameter_other_memory_is_refused_where_updates_would_miss_it(
    launcher: LocalLauncher, plan: str
) -> None:
    (report,) = proved(launcher, (plan,), kind="rebinds", optim="SGD")
    assert report.status == "refused"
    assert "forward gives the parameter layer.weight other memory" in str(report.reason)
    exact(proved(launcher, ("dp=2",), kind="rebinds", optim="SGD"))


@pytest.mark.parametrize("kind", ["columns", "frozen view"])
def test_tensors_side_by_side_in_one_memory_are_exact(launcher: LocalLauncher, kind: str) -> None:
    exact(proved(launcher, ("dp=1", "dp=2", "dp=2,zero=3"), kind=kind, optim="SGD"))


@pytest.mark.parametrize(("kind", "name"), [("view", "rows"), ("buffer", "rows")])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_tensor_in_a_trained_parameters_memory_is_told(
    launcher: LocalLauncher, kind: str, name: str, precision: str
) -> None:
    """On one device each update of the one would change the other."""
    (report,) = proved(launcher, ("dp=1",), kind=kind, precision=precision, optim="SGD")
    assert report.status == "failed" and f"task: {name} lies in the memory of a parameter" in str(report.reason)
