"""Faults that other systems really had: statistics, views, buckets, groups and frozen parts under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.launch import Job, LocalLauncher
from stretto.plan import Plan
from stretto.verify import verify
from stretto.verify.run import preloads

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
PARTS = ROOT / "tests" / "tasks" / "parts.py"
FOUR = ("dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp_replicate=2,dp_shard=2")
PLANS = ("dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp_replicate=2,dp_shard=2")
HALVES = tuple(f"{plan},microbatches=2" for plan in PLANS)


def job(launcher: LocalLauncher, entry: str, workers: int, **payload: Any) -> list[Any]:
    """What each worker returned, in rank order."""
    result = launcher.run(Job(f"part_entries:{entry}", payload, workers, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results, key=lambda name: int(name[1:]))]


def trained(
    launcher: LocalLauncher, folder: Path, plans: tuple[str, ...], steps: int, in_order: bool = False, **sets: Any
) -> list[list[Any]]:
    """For each plan what each rank has after ``steps`` steps; all plans are of one size."""
    workers = Plan.parse(plans[0]).world_size
    more = {"task": str(PARTS), "sets": sets, "plans": plans, "num_steps": steps, "in_order": in_order}
    ranks = job(launcher, "trained", workers, folder=str(folder / str(workers)), **more)
    return [list(plan) for plan in zip(*ranks, strict=True)]


def exact(launcher: LocalLauncher, plans: tuple[str, ...], **sets: str) -> None:
    for report in verify(PARTS, plans, sets, launcher=launcher).plans:
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        assert (report.grad_max_rel or 0) <= 1e-13 and (report.weight_max_rel or 0) <= 1e-13, report


@pytest.mark.parametrize("ghost", [False, True])
def test_the_backward_of_the_only_collective_in_a_graph_is_that_of_finite_differences_ls13(
    launcher: LocalLauncher, ghost: bool
) -> None:
    for rank in job(launcher, "normalised", 3, ghost=ghost):
        assert rank["analytic"] == pytest.approx(rank["numeric"], rel=1e-6, abs=1e-8)
        assert any(rank["numeric"]) or ghost


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_batch_norms_answer_alike_on_all_ranks_from_the_checkpoint_and_on_one_device_dp01_dp15(
    launcher: LocalLauncher, tmp_path: Path, precision: str
) -> None:
    """Ten steps, ranks whose data have means 0 and 10."""
    sets = {"batch": 16, "precision": precision, "kind_of_step": "sgd"}
    ((alone,),) = trained(launcher, tmp_path, ("dp=1",), 10, in_order=True, **sets)
    near: dict[str, float] = {"rel": 1e-9, "abs": 1e-11} if precision == "fp64" else {"rel": 0.2, "abs": 0.05}
    for ranks in trained(launcher, tmp_path, FOUR, 10, in_order=True, **sets):
        for rank in ranks:
            assert rank["answers"] == ranks[0]["answers"] == rank["reloaded"], rank["plan"]
            assert rank["buffers"] == ranks[0]["buffers"], "equal to the bit, before anything is sent"
            assert rank["weights"] == ranks[0]["weights"]
            for name, values in alone["weights"].items():
                assert rank["weights"][name] == pytest.approx(values, **near), f"{rank['plan']}: {name}"


def test_running_statistics_weigh_each_rank_by_its_samples_dp03(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Six samples on four ranks: two have two, two have one."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[12:] += 10
    six = x[::4]
    for ranks in trained(launcher, tmp_path, FOUR, 1, in_order=True, batch=6, precision="fp64"):
        for rank in ranks:
            assert rank["buffers"]["0.running_mean"] == pytest.approx((0.1 * six.mean(0)).tolist(), rel=1e-12)
            assert rank["buffers"]["0.running_var"] == pytest.approx((0.9 + 0.1 * six.var(0)).tolist(), rel=1e-12)


def test_a_layer_that_nobody_uses_keeps_no_other_from_being_reduced_dp05(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    for ranks in trained(launcher, tmp_path, FOUR, 1, in_order=True, kind="unused", precision="fp64"):
        for rank in ranks:
            assert rank["weights"] == ranks[0]["weights"]
            assert set(rank["state"]) <= {"a.weight", "a.bias"}, "what nothing reached has no state, as on one device"
    exact(launcher, PLANS, kind="unused")


@pytest.mark.parametrize("reentrant", ["false", "true"])
def test_a_frozen_branch_recomputation_and_microbatches_work_together_dp07(
    launcher: LocalLauncher, reentrant: str
) -> None:
    exact(launcher, HALVES, kind="branches", reentrant=reentrant)


def test_the_first_windows_gradient_is_the_seconds_of_the_same_data_dp13(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """One or two microbatches a step, parameters used in another order than they are registered, a learning rate of 0."""
    plans = (*(f"{plan},microbatches=2" for plan in FOUR), "dp=4,zero=2", "dp=4,zero=3")  # where sums pass on, too
    for ranks in trained(launcher, tmp_path, plans, 2, in_order=True, kind="reordered", lr=0.0, precision="fp64"):
        for rank in ranks:
            first, second = rank["gradients"]
            assert first == second, rank["plan"]
        assert any(any(values) for rank in ranks for values in rank["gradients"][0].values() if values)
    exact(launcher, HALVES, kind="reordered")


def test_a_module_that_is_frozen_as_a_whole_runs_and_keeps_its_buffers_and_no_state_dp17(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    for ranks in trained(launcher, tmp_path, FOUR, 4, in_order=True, kind="backbone", precision="fp64"):
        for rank in ranks:
            assert set(rank["state"]) <= {"head.weight", "head.bias"}
            assert rank["buffers"] == ranks[0]["buffers"]
            assert rank["buffers"]["backbone.1.num_batches_tracked"] == [4]
    exact(launcher, PLANS, kind="backbone")


def refused(launcher: LocalLauncher, folder: Path, plan: str, **sets: Any) -> str:
    payload = {"task": str(PARTS), "sets": sets, "plans": [plan], "num_steps": 4, "folder": str(folder)}
    found = launcher.run(Job("part_entries:trained", payload, Plan.parse(plan).world_size, python_path=(HELPERS,)))
    assert found.failure is not None and found.failure.kind == "user", found.failure
    return found.failure.text


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=2", "dp=2,zero=3"])
def test_what_is_unfrozen_while_it_trains_is_named_dp17(launcher: LocalLauncher, tmp_path: Path, plan: str) -> None:
    text = refused(launcher, tmp_path, plan, kind="backbone", thaw=2)
    assert "backbone.0.weight was frozen when model() returned and requires a gradient now" in text
    assert "\n" not in text


def test_a_model_of_which_nothing_trains_is_said_dp17(launcher: LocalLauncher, tmp_path: Path) -> None:
    assert "a sum without a gradient" in refused(launcher, tmp_path, "dp=2", kind="frozen")


def test_groups_by_number_of_dimensions_are_those_of_one_device_sh04(launcher: LocalLauncher, tmp_path: Path) -> None:
    sets = {"kind": "reordered", "precision": "fp64"}
    for ranks in trained(launcher, tmp_path, FOUR, 1, **sets):
        for rank in ranks:
            (decayed, high), (plain, low) = rank["groups"]
            assert (high, low) == (0.3, 0.0)
            assert decayed == [f"{layer}.weight" for layer in ("last", "middle", "first", "twice")], rank["plan"]
            assert plain == [f"{layer}.bias" for layer in ("last", "middle", "first", "twice")]
    exact(launcher, PLANS, kind="reordered")
