"""Scaled losses, float32 masters, clipping and windows, with numbers known by heart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.launch import Job, LocalLauncher
from stretto.plan import Plan
from stretto.preload import preloads

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
DOT = str(ROOT / "tests" / "tasks" / "dot.py")


def trained(launcher: LocalLauncher, plan: str, steps: int, **sets: Any) -> list[Any]:
    """What each rank saw of ``steps`` steps: outcomes, and the parameter after each, gathered to its full shape."""
    payload = {"task": DOT, "plan": plan, "num_steps": steps, "sets": sets}
    job = Job("engine_entries:weights", payload, Plan.parse(plan).world_size, python_path=(HELPERS,))
    result = launcher.run(job)
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results)]


@pytest.mark.parametrize("plan", ["dp=1,microbatches=4", "dp=2,microbatches=2", "dp=3,zero=1,microbatches=4"])
def test_a_short_window_is_divided_by_what_it_holds_ls05_ls07(launcher: LocalLauncher, plan: str) -> None:
    """Ten samples of gradient 1 in batches of 4, 4 and 2: three steps, and each moves w by exactly the learning rate."""
    for rank in trained(launcher, plan, 3, rows="ones", lr=0.5, batch=4):
        assert [step["w"] for step in rank["steps"]] == [[-0.5], [-1.0], [-1.5]]
        assert [step["samples"] for step in rank["steps"]] == [4, 4, 2]


@pytest.mark.parametrize("plan", ["dp=2,microbatches=2", "dp=2,zero=2,microbatches=2", "dp=2,zero=1,microbatches=2"])
def test_every_microbatch_of_every_rank_is_in_the_gradient_ls11(launcher: LocalLauncher, plan: str) -> None:
    for rank in trained(launcher, plan, 1, rows="ladder", batch=4):
        assert rank["steps"][0]["w"] == [-(1 + 3 + 2 + 5) / 4]
        assert rank["steps"][0]["grad_norm"] == 2.75


def test_the_schedule_moves_once_a_step_on_every_rank_ls09(launcher: LocalLauncher) -> None:
    for rank in trained(launcher, "dp=4", 6, rows="ladder", batch=4, every=2):
        assert [step["learning_rate"] for step in rank["steps"]] == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("plan", ["dp=1,microbatches=2", "dp=2", "dp=2,zero=3"])
def test_clipping_acts_once_on_the_whole_unscaled_gradient_pc08_pc10(
    launcher: LocalLauncher, plan: str, precision: str
) -> None:
    """Weights of 1/2 make the gradient (3, 4), of norm 5; clipped to 1 it is (0.6, 0.8). One of norm 0.5 is left alone."""
    for rank in trained(launcher, plan, 4, rows="corner", weight=0.5, batch=2, clip=1.0, precision=precision):
        step = first_taken(rank)
        assert step["grad_norm"] == pytest.approx(5.0, rel=1e-6)
        assert step["w"] == pytest.approx([-0.6, -0.8], rel=1e-5)
    for rank in trained(launcher, plan, 4, rows="small", weight=0.5, batch=4, clip=1.0, precision=precision):
        step = first_taken(rank)
        assert step["grad_norm"] == pytest.approx(0.5, rel=4e-3)
        assert step["w"] == pytest.approx([-0.3, -0.4], rel=4e-3)


def first_taken(rank: Any) -> Any:
    """The first step that was not skipped: in float16 the first ones overflow until the scale is small enough."""
    return next(step for step in rank["steps"] if step["skipped"] is None)


@pytest.mark.parametrize("plan", ["dp=3", "dp=3,zero=1", "dp=3,zero=3"])
def test_all_ranks_skip_the_same_step_and_keep_the_same_scale_pc06_hg13(launcher: LocalLauncher, plan: str) -> None:
    """Two elements on three ranks: one has nothing, and follows all the same. Sample 1 is infinite."""
    (alone,) = trained(launcher, "dp=1,microbatches=3", 3, rows="inf", batch=4, precision="fp16", lr=0.5)
    ranks = trained(launcher, plan, 3, rows="inf", batch=4, precision="fp16", lr=0.5)
    for rank in (alone, *ranks):
        assert [step["scale"] for step in rank["steps"]] == [32768.0, 16384.0, 8192.0]
        assert all("not finite" in step["skipped"] for step in rank["steps"])
        assert rank["steps"][-1]["w"] == [0.0, 0.0]
    assert [r["steps"][0]["skipped"] for r in ranks] == [ranks[0]["steps"][0]["skipped"]] * 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp_replicate=2,dp_shard=2"])
def test_updates_too_small_for_the_copies_are_kept_in_float32_masters_pc12(
    launcher: LocalLauncher, plan: str, precision: str
) -> None:
    """Steps of 1e-4 from 1: a bfloat16 next to 1 is 0.004 away, so without a master w would never move."""
    for rank in trained(launcher, plan, 8, rows="ones", start=1.0, lr=1e-4, kind="adam", precision=precision):
        taken = sum(step["skipped"] is None for step in rank["steps"])
        assert taken >= 6
        assert rank["steps"][-1]["w"] == pytest.approx([1.0 - taken * 1e-4], abs=2e-6)
        assert rank["steps"][-1]["dtypes"] == ["float32"]
        assert rank["compute"] == {"bf16": "bfloat16", "fp16": "float16"}[precision]


def test_what_is_logged_is_the_same_number_on_every_rank_pc04(launcher: LocalLauncher) -> None:
    one, other = trained(launcher, "dp=2,zero=3", 3, rows="ladder", batch=3)
    assert [step["grad_norm"] for step in one["steps"]] == [step["grad_norm"] for step in other["steps"]]
    assert [step["loss"] for step in one["steps"]] == [step["loss"] for step in other["steps"]]
    (alone,) = trained(launcher, "dp=1", 3, rows="ladder", batch=3)
    assert [step["grad_norm"] for step in one["steps"]] == pytest.approx([s["grad_norm"] for s in alone["steps"]], 1e-6)
