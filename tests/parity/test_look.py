"""A second look at a plan that cuts the model: on a right one it sees nothing, and it changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parity import ROOT, TASKS
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.plan import Plan
from stretto.verify import verify

SETS = {name: {"precision": "fp64", **sets} for name, _, sets in TASKS}
PATHS = {name: path for name, path, _ in TASKS}
STRICT = 1e-10  # far under the bound that a failed plan is looked at with
MATRIX = pytest.mark.matrix


def run(launcher: LocalLauncher, folder: Path, job: dict[str, Any], entry: str, count: int = 1) -> JobResult:
    module, payload = f"stretto.verify.{entry}", {**job, "folder": str(folder)}
    if entry == "reference":
        return launcher.run(Job(f"{module}:run", payload, log_dir=folder / "logs"))
    return launcher.run(
        Job(f"{module}:work", payload, prepare=f"{module}:prepare", num_workers=count, log_dir=folder / "logs")
    )


@pytest.mark.parametrize(
    ("name", "text", "precision"),
    [
        ("gpt", "tp=2,microbatches=2", "fp64"),
        ("mlp_dropout", "pp=3,microbatches=2", "fp64"),
        ("mlp_dropout", "pp=2,microbatches=2,recompute=full", "fp64"),
        *(pytest.param(name, "pp=2", "fp64", marks=MATRIX) for name in ("digits", "ranking", "lstm", "multi")),
        *(pytest.param(name, "tp=2", "fp64", marks=MATRIX) for name in ("mlp_dropout", "ranking", "llama", "bert")),
        pytest.param("gpt", "pp=2,schedule=interleaved,microbatches=2", "fp64", marks=MATRIX),
        pytest.param("gpt", "tp=2,pp=2,microbatches=3,schedule=zero-bubble", "fp64", marks=MATRIX),
        pytest.param("gpt", "dp=2,pp=2,zero=3", "bf16", marks=MATRIX),
    ],
)
def test_a_look_at_a_right_plan_sees_nothing_and_changes_nothing(
    launcher: LocalLauncher, tmp_path: Path, name: str, text: str, precision: str
) -> None:
    plan = Plan.parse(text)
    sets = {**SETS[name], "precision": precision}
    job = {"task": str(ROOT / PATHS[name]), "sets": sets, "steps": 2, "plant": None}
    run(launcher, tmp_path, {**job, "pieces": plan.dp * plan.microbatches}, "reference")
    job["plan"] = text
    plain = run(launcher, tmp_path, job, "worker", plan.world_size).results
    cut = next(iter(plain.values()))["assignment"]
    looked = run(launcher, tmp_path, {**job, "look": [2, STRICT], "assignment": cut}, "worker", plan.world_size).results
    assert len(plain) == len(looked) == plan.world_size
    for member, found in looked.items():
        assert found["seen"] is None
        assert found["assignment"] == cut
        assert found["facts"] == plain[member]["facts"], "looking changes no number"


def test_a_schedule_that_leaves_a_gradient_out_is_refused_before_the_first_step(launcher: LocalLauncher) -> None:
    plant = "stretto.testing.faults.stages:schedule_without_a_backward"
    (plan,) = verify(ROOT / "tests/tasks/skips.py", ["pp=2,microbatches=2"], launcher=launcher, plant=plant).plans
    assert plan.status == "refused"
    assert "is missing on rank 0, so a gradient would not be made" in str(plan.reason)
