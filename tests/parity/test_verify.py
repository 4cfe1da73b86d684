"""The law of the house, measured: every plan gives one device's numbers, on every kind of model."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from parity import FIGURES, Figures, check, prove
from stretto.errors import PlanError, TaskError
from stretto.launch import LocalLauncher
from stretto.verify import PlanReport, VerifyReport, verify
from stretto.verify import reference as reference_module


# Dropout draws by the piece, so it is no part of the grid: the reference cuts as the plan does.
def test_random_numbers_are_those_of_one_device_that_cuts_alike(launcher: LocalLauncher, figures: Figures) -> None:
    plans = ("dp=1,microbatches=3", "dp=3", "dp=3,zero=3")
    check(prove(launcher, "mlp_dropout", plans, {"kind": "adamw"}), "mlp_dropout adamw", figures)


def test_short_batches_and_ranks_without_samples_are_those_of_one_device(
    launcher: LocalLauncher, figures: Figures
) -> None:
    """17 samples in batches of 7: every third batch holds 3, so that of four ranks one runs a ghost."""
    report = prove(launcher, "mlp_dropout", ("dp=4", "dp=4,zero=3"), {"size": "17"})
    check(report, "mlp_dropout size=17", figures)


def test_rounding_noise_on_a_zero_gradient_is_left_out_and_named(launcher: LocalLauncher) -> None:
    """A softmax is blind to what is added to all keys, so the keys' bias (a third of 3 * 32) has gradient 0."""
    (plan,) = prove(launcher, "gpt", ("dp=2",), {}).plans
    bias = "blocks.{}.query_key_value.bias"
    assert dict(plan.left_out) == {bias.format(0): 32, bias.format(1): 32}


def test_float32_is_measured_with_its_own_bounds(launcher: LocalLauncher) -> None:
    report = prove(launcher, "lstm", ("dp=2",), {"precision": "fp32"})
    (plan,) = report.plans
    assert report.dtype == "float32"
    assert plan.status == "passed"
    assert plan.weight_max_rel is not None
    assert 1e-10 < plan.weight_max_rel < 1e-5


# ------------------------------------------------------------------------------- what can't or doesn't run


NORM_AND_DROPOUT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from stretto import losses
from stretto.recipe import Recipe

def model(dropout: float = 0.5):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))

def data():
    print("a line of the task's own")
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(20, 4, generator=drawn), torch.randn(20, 1, generator=drawn))

def loss(output, batch):
    return losses.mse(output, batch[1])

def optimizer(params):
    return torch.optim.Adagrad(params, lr=0.1)

def recipe():
    return Recipe(batch=6, steps=3)
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "written.py"
    path.write_text(text)
    return path


def one(report: VerifyReport) -> PlanReport:
    (plan,) = report.plans
    return plan


def test_plans_are_refused_with_their_reasons(launcher: LocalLauncher) -> None:
    report = prove(launcher, "digits", ("dp=2,microbatches=2", "cp=2", "dp=1", "dp=1,loaders=2"), {})
    split, later, plain, loaded = report.plans
    assert [plan.status for plan in report.plans] == ["refused", "refused", "passed", "passed"]
    assert loaded.reason == "loaders=2 took no part: verify watches each worker fetch its samples itself"
    assert "BatchNorm" in (split.reason or "") and "microbatches=1" in (split.reason or "")
    assert "not built yet" in (later.reason or "")
    assert plain.reason is None
    assert report.passed, "a refused plan is no failed one"
    with pytest.raises(PlanError, match="did you mean 'dp'"):  # what means nothing is the user's to mend
        prove(launcher, "digits", ("dpp=2",), {})


def test_batch_norm_beside_random_numbers_is_compared_whole_only(launcher: LocalLauncher, tmp_path: Path) -> None:
    task = write(tmp_path, NORM_AND_DROPOUT)
    whole, cut = verify(task, ("dp=1", "dp=2"), launcher=launcher).plans
    assert whole.status == "passed" and whole.steps == 3, "never more steps than the recipe has"
    assert cut.status == "refused"
    assert "BatchNorm" in (cut.reason or "") and "random numbers" in (cut.reason or "")
    assert one(verify(task, ("dp=2",), {"dropout": "0"}, launcher=launcher)).status == "passed"


def test_a_task_that_prints_does_not_print_into_the_report(
    launcher: LocalLauncher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verify(write(tmp_path, NORM_AND_DROPOUT), ("dp=1",), launcher=launcher)
    assert "a line of the task's own" not in capfd.readouterr().out


def test_a_worker_that_fails_makes_a_failed_plan(launcher: LocalLauncher) -> None:
    plan = one(prove(launcher, "lstm", ("dp=2",), {}, plant="builtins:next"))  # next(rank) raises
    assert plan.status == "failed"
    assert "TypeError: 'int' object is not an iterator" in (plan.reason or "")
    assert "member" in (plan.reason or "") and plan.first_divergence is None


def test_a_task_that_fails_on_one_device_is_told_apart(launcher: LocalLauncher, tmp_path: Path) -> None:
    broken = NORM_AND_DROPOUT.replace("nn.Linear(8, 1)", "nn.Linear(9, 1)")
    plan = one(verify(write(tmp_path, broken), ("dp=2",), launcher=launcher))
    assert plan.status == "failed"
    assert (plan.reason or "").startswith("one device alone fails") and "RuntimeError" in (plan.reason or "")


def test_a_users_mistake_is_one_line(launcher: LocalLauncher, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no file"):
        verify(tmp_path / "nothing.py", ("dp=2",), launcher=launcher)
    with pytest.raises(Exception, match="did you mean 'width'") as raised:
        prove(launcher, "lstm", ("dp=2",), {"widht": "3"})
    assert "\n" not in str(raised.value)


def test_the_report_has_the_promised_fields(launcher: LocalLauncher) -> None:
    report = prove(launcher, "lstm", ("dp=2", "tp=14"), {}, plant="stretto.testing.faults:wrong_divisor")
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(found) == {"passed", "dtype", "plans"} and found["passed"] is False
    fields = {"plan", "status", "reason", "steps", *FIGURES, "left_out", "first_divergence"}
    assert all(set(plan) == fields for plan in found["plans"])
    failed, refused = found["plans"]
    assert set(failed["first_divergence"]) == {"step", "what", "name", "rank", "by", "likely"}
    assert refused["grad_max_rel"] is None and refused["first_divergence"] is None


def test_the_reference_uses_nothing_of_the_engine_it_judges() -> None:
    tree = ast.parse(Path(reference_module.__file__).read_text())
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    own = {name for name in used if name.startswith("stretto.")}
    assert own == {
        "stretto.data",
        "stretto.launch",
        "stretto.precision",
        "stretto.task",
        "stretto.verify.compare",
        "stretto.verify.facts",
        "stretto.verify.tolerances",
    }
