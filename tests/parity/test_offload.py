"""Whatever waits on the host, the numbers are those of one device that keeps everything.

The workers' device is a CPU, so the condition ``host_apart`` lets it count as another than the host: everything is then
moved, by the very code that moves it from an accelerator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parity import FIGURES, ROOT, TINY_GPT, Figures, check, prove
from stretto.launch import Job, LocalLauncher
from stretto.plan import Plan
from stretto.verify import verify

APART = "stretto.testing.conditions:host_apart"
SEPARATE = f"{APART},stretto.testing.conditions:separate_memory"
HELPERS, TASKS = (ROOT / "tests" / name for name in ("helpers", "tasks"))
# (task, plans, plans where no memory is shared)
SAMPLE = (
    ("gpt", ("dp=2,zero=2,microbatches=2,recompute=full,offload=all",), ("dp=2,zero=3,offload=all",)),
    ("digits", ("dp=2,zero=3,offload=all",), ()),
    ("lstm", ("dp=2,offload=activations",), ()),  # torch's own changes parts of one memory apart
    ("ranking", ("dp=2,zero=1,offload=optimizer",), ()),
)
GRID = tuple(
    f"{plan},offload=all{more}"
    for plan in (
        "dp=1",
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2,microbatches=2",
        "dp=2,zero=3",
        "dp_replicate=2,dp_shard=2",
    )
    for more in ("", ",recompute=selective", ",recompute=full")
)

DIVIDED = (
    ("gpt", "dp=2,tp=2,offload=all"),
    ("gpt", "dp=2,tp=2,zero=3,offload=all"),
    ("gpt", "pp=2,schedule=interleaved,microbatches=2,offload=all"),
    ("gpt", "dp=2,pp=2,zero=1,microbatches=3,offload=all"),
    ("gpt", "pp=2,tp=2,zero=2,offload=optimizer"),
    ("digits", "pp=2,schedule=zero-bubble,offload=all"),
    ("ranking", "pp=2,microbatches=2,offload=all"),
    ("mlp_dropout", "pp=3,microbatches=2,offload=all"),
    ("multi", "pp=2,microbatches=2,offload=all"),
)


@pytest.mark.parametrize(("name", "together", "apart"), SAMPLE, ids=[row[0] for row in SAMPLE])
def test_a_sample_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, together: tuple[str, ...], apart: tuple[str, ...]
) -> None:
    hold(launcher, figures, name, together, apart)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt", "digits", "ranking", "lstm", "llama", "bert", "multi", "mlp_dropout"])
def test_the_whole_grid_has_the_numbers_of_one_device(launcher: LocalLauncher, figures: Figures, name: str) -> None:
    sharded = tuple(plan for plan in GRID if "shard" in plan or "zero=3" in plan)
    hold(launcher, figures, name, GRID, sharded)


def hold(
    launcher: LocalLauncher, figures: Figures, name: str, together: tuple[str, ...], apart: tuple[str, ...]
) -> None:
    refused = {plan: "BatchNorm" for plan in (*together, *apart) if name == "digits" and "micro" in plan}
    for plans, plant in ((together, APART), (apart, SEPARATE)):
        if not plans:
            continue
        report = prove(launcher, name, plans, {}, plant)
        check(report, f"{name} offload", figures, refused)
        for plan in report.plans:
            assert plan.plan in refused or "on the host" in (plan.reason or "")


def test_sparse_complex_frozen_and_tied_parameters_stay_exact(launcher: LocalLauncher, figures: Figures) -> None:
    of = ["dp_replicate=2,dp_shard=2,offload=all"]
    check(verify(TASKS / "hard_parts.py", of, {}, launcher=launcher, plant=APART), "hard_parts offload", figures)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "tp=2,offload=all"),
        ("gpt", "pp=2,microbatches=3,schedule=zero-bubble,offload=all"),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in DIVIDED),
    ],
)
def test_layers_and_stages_that_are_cut_wait_there_as_well(
    launcher: LocalLauncher, figures: Figures, name: str, plan: str
) -> None:
    report = prove(launcher, name, (plan,), {}, APART)
    check(report, f"{name} offload", figures)
    assert all("on the host" in (plan.reason or "") for plan in report.plans)


@pytest.mark.parametrize(
    ("fault", "name", "plan", "what"),
    [
        ("memory_taken_for_another", "mlp_dropout", "pp=2,microbatches=2,offload=activations", "gradient"),
        ("weights_left_on_the_host", "gpt", "tp=2,offload=optimizer", "loss"),
    ],
)
def test_a_fault_on_their_way_shows(launcher: LocalLauncher, fault: str, name: str, plan: str, what: str) -> None:
    (report,) = prove(launcher, name, (plan,), {}, f"stretto.testing.faults:{fault},{APART}").plans
    found = report.first_divergence
    assert found is not None and (found.step, found.what) == (2, what), report


@pytest.mark.parametrize(
    ("plan", "plant"),
    [
        ("dp=2,zero=1,offload=all", APART),
        pytest.param("dp=2,offload=all", APART, marks=pytest.mark.matrix),
        pytest.param("dp=2,zero=3,offload=all", APART, marks=pytest.mark.matrix),
        pytest.param("dp=2,zero=3,offload=all", SEPARATE, marks=pytest.mark.matrix),
    ],
)
def test_in_low_precision_one_step_is_that_of_keeping_everything(
    launcher: LocalLauncher, plan: str, plant: str
) -> None:
    sets = {**TINY_GPT, "steps": "1", "precision": "bf16"}
    (report,) = verify(ROOT / "examples" / "gpt", [plan], sets, launcher=launcher, plant=plant).plans
    assert report.status == "passed", f"{report.plan}: {report.reason}"
    assert all(getattr(report, figure) <= 2e-6 for figure in FIGURES), report


def test_where_the_device_is_the_host_it_says_that_nothing_moves(launcher: LocalLauncher) -> None:
    (report,) = verify(TASKS / "lstm.py", ["dp=1,offload=all"], {}, launcher=launcher).plans
    assert report.status == "passed"
    assert "offload=all is inactive: the workers' device is the host (cpu)" in (report.reason or "")


# --------------------------------------------------------------------------------- the engine under the condition


def run(launcher: LocalLauncher, entry: str, plan: str, **payload: Any) -> Any:
    asked = {"plan": plan, "num_steps": 3, "host_apart": True, **payload}
    job = Job(f"engine_entries:{entry}", asked, Plan.parse(plan).world_size, python_path=(str(HELPERS),))
    return launcher.run(job)


@pytest.mark.parametrize(
    "plans",
    [("dp=2,zero=3,offload=all", "dp=1"), ("dp=2", "dp=2,zero=1,offload=optimizer")],
)
def test_a_checkpoint_goes_on_with_and_without_it(
    launcher: LocalLauncher, tmp_path: Path, plans: tuple[str, str]
) -> None:
    asked: dict[str, Any] = {"task": str(ROOT / "examples" / "gpt"), "sets": {**TINY_GPT, "precision": "fp64"}}
    alone = run(launcher, "steps", "dp=1", **{**asked, "num_steps": 6}).results["m1"]["outcomes"]
    result = run(launcher, "rebuild", plans[0], plans=plans, folder=str(tmp_path / "saved"), **asked)
    assert result.failure is None, result.failure.text
    assert result.results["m1"]["losses"] == pytest.approx([outcome["loss"] for outcome in alone], rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("max_norm", "forward changes the parameter table.weight, which is trained on the host"),
        ("clamped", "forward changes the parameter enter.weight"),
        ("data", "forward changes the parameter enter.weight"),
        ("replaced", "forward changes the parameter enter.weight"),
        ("func", "the model takes derivatives with torch.func in forward"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(launcher: LocalLauncher, kind: str, says: str) -> None:
    asked = {"task": str(TASKS / "traps.py"), "sets": {"kind": kind}}
    assert run(launcher, "steps", "dp=1", **asked).failure is None, "one device does it"
    failure = run(launcher, "steps", "dp=1,offload=all", **asked).failure
    assert failure is not None and failure.kind == "user" and says in failure.text, failure


def test_weights_that_forward_only_lays_elsewhere_train_on(launcher: LocalLauncher) -> None:
    asked = {"task": str(TASKS / "traps.py"), "sets": {"kind": "moved"}}
    one, other = (run(launcher, "steps", plan, **asked).results["m1"] for plan in ("dp=1", "dp=1,offload=all"))
    assert one["state"] == other["state"]
