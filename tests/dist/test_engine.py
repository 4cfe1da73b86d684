"""The seams of the step, on real workers: vote, break, teardown, ghosts, weights, and what each must leave alone."""

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
ODD = str(ROOT / "tests" / "tasks" / "odd_parts.py")
DIGITS = str(ROOT / "examples" / "digits")
GPT = str(ROOT / "examples" / "gpt")
TINY = {"depth": 2, "width": 32, "context": 16, "heads": 2, "batch": 7, "precision": "fp64"}


def run(launcher: LocalLauncher, entry: str, workers: int, prepare: str | None = None, **payload: Any) -> list[Any]:
    """What each worker returned, in rank order."""
    ready = None if prepare is None else f"engine_entries:{prepare}"
    job = Job(f"engine_entries:{entry}", payload, workers, prepare=ready, python_path=(HELPERS,))
    result = launcher.run(job)
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results, key=lambda name: int(name[1:]))]


def steps(launcher: LocalLauncher, plan: str, task: str = ODD, num_steps: int = 3, **payload: Any) -> list[Any]:
    return run(launcher, "steps", Plan.parse(plan).world_size, task=task, plan=plan, num_steps=num_steps, **payload)


@pytest.mark.parametrize(
    ("task", "sets", "plan"),
    [
        *((ODD, {}, plan) for plan in ("dp=2", "dp=2,zero=3")),
        (DIGITS, {"batch": 7, "precision": "fp64"}, "dp=2,zero=3"),
        pytest.param(DIGITS, {"batch": 7, "precision": "fp64"}, "dp=2", marks=pytest.mark.matrix),
    ],
)
def test_a_step_voted_down_leaves_no_trace(launcher: LocalLauncher, plan: str, task: str, sets: dict[str, Any]) -> None:
    undisturbed = steps(launcher, plan, task, sets=sets)
    vetoed = steps(launcher, plan, task, sets=sets, veto={"rank": 1, "step": 2, "times": 2})
    assert [rank["attempts"] for rank in vetoed] == [3, 3], "every rank runs the step again"
    for before, after in zip(undisturbed, vetoed, strict=True):
        if task == ODD:
            assert after["state"] == before["state"], "weights, buffers, optimizer state and generators, bit for bit"
        assert before["generators_kept"] and after["generators_kept"], "what the loop itself draws is undisturbed"
        for name, moments in before["moments"].items():  # convolutions don't repeat to the last bit
            assert after["moments"][name] == pytest.approx(moments, rel=1e-11, abs=1e-12), name


def test_a_step_that_no_vote_lets_pass_is_an_error_and_changes_nothing(launcher: LocalLauncher) -> None:
    for rank in steps(launcher, "dp=2", veto={"rank": 0, "step": 2, "times": 9}):
        assert len(rank["outcomes"]) == 1
        assert "voted down" in rank["failed"]
        assert rank["untouched"]


@pytest.mark.alone
def test_a_sleeper_in_a_collective_is_freed_by_another_thread(launcher: LocalLauncher) -> None:
    first, _ = run(launcher, "break_asleep", 2, seconds=3)
    assert first["freed_after"] is not None, "the all-reduce came back without an error"
    assert first["freed_after"] < 0.5


@pytest.mark.parametrize("plans", [("dp=3,zero=3", "dp=2,zero=3"), ("dp=2,zero=3", "dp=1"), ("dp=3", "dp=2,zero=3")])
def test_a_model_is_torn_down_and_rebuilt_in_the_same_process(
    launcher: LocalLauncher, tmp_path: Path, plans: tuple[str, str]
) -> None:
    whole = steps(launcher, "dp=1", GPT, 6, sets=TINY)[0]
    assert whole["failed"] is None
    alone = [outcome["loss"] for outcome in whole["outcomes"]]
    workers = Plan.parse(plans[0]).world_size
    found = run(
        launcher, "rebuild", workers, task=GPT, sets=TINY, plans=plans, num_steps=3, folder=str(tmp_path / "saved")
    )
    assert found[0]["losses"] == pytest.approx(alone, rel=1e-12)
    assert [rank["left"] for rank in found] == [rank >= Plan.parse(plans[1]).world_size for rank in range(workers)]


@pytest.mark.parametrize(
    "plan", ["dp=3", "dp=3,zero=3", "dp=1,microbatches=3", "dp=2,zero=3,microbatches=2", "dp=2,microbatches=3"]
)
def test_ranks_without_samples_run_ghosts_hg19_hg21(launcher: LocalLauncher, plan: str) -> None:
    """Batches of two on up to six pieces: some see nothing, and the numbers are those of one device."""
    sets = {"batch": 2}
    alone = steps(launcher, "dp=1", num_steps=7, sets=sets)[0]
    for rank in steps(launcher, plan, num_steps=7, sets=sets):
        for here, there in zip(rank["outcomes"], alone["outcomes"], strict=True):
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-12, nan_ok=True)
            assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-12)
            assert here["weight"] == there["weight"]
        for name, pair in alone["totals"].items():
            assert rank["totals"][name] == pytest.approx(pair, rel=1e-12), "evaluation is exact too"


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=3"])
def test_a_batch_without_weight_is_committed_without_an_update(launcher: LocalLauncher, plan: str) -> None:
    sets = {"length": 1, "batch": 1}  # sample 0 alone, whose weight is 0
    for rank in steps(launcher, plan, num_steps=2, sets=sets):
        assert [outcome["skipped"] for outcome in rank["outcomes"]] == ["the batch has no weight"] * 2
        assert rank["lrs"] == pytest.approx([1e-2 * 0.9**2]), "the schedule advances"
        assert not any(name.startswith("optimizer/") for name in rank["state"]), "the optimizer was not called"


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_a_gradient_that_is_not_finite_is_skipped_by_every_rank(launcher: LocalLauncher, plan: str) -> None:
    for rank in steps(launcher, plan, num_steps=3, sets={"poison": 5}):
        said = [outcome["skipped"] for outcome in rank["outcomes"]]
        assert [text for text in said if text is not None] == [
            "the gradient is not finite: neither is the loss on rank 1"
        ]
        assert said.count(None) == 2


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=3"])
def test_a_parameter_that_nothing_uses_is_left_alone(launcher: LocalLauncher, plan: str) -> None:
    """One device leaves its gradient None, so not even weight decay moves it."""
    for rank in steps(launcher, plan):
        assert set(rank["unused"]) == {1.0}


def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_they_would_be_cut(launcher: LocalLauncher) -> None:
    sets = {"kind": "Adafactor"}
    payload = {"task": ODD, "plan": "dp=2,zero=3", "num_steps": 1, "sets": sets}
    failure = launcher.run(Job("engine_entries:steps", payload, 2, python_path=(HELPERS,))).failure
    assert failure is not None and failure.kind == "user"
    assert "looks at whole tensors" in failure.text and "zero=2" in failure.text
    assert steps(launcher, "dp=2", sets=sets)[0]["failed"] is None


TRAPS = str(ROOT / "tests" / "tasks" / "traps.py")


@pytest.mark.parametrize(
    ("sets", "plan"),
    [
        ({"kind": "reentrant"}, "dp=2"),
        ({"kind": "reentrant"}, "dp=2,zero=3"),
        ({"kind": "experts"}, "dp=2"),
        ({"kind": "experts"}, "dp=2,zero=3"),
        ({"kind": "complex"}, "dp=2,zero=3"),
        ({"optim": "Adagrad"}, "dp=2"),
        ({"optim": "Adagrad"}, "dp=3,zero=3"),
    ],
)
def test_what_is_easily_computed_wrongly_is_exact_hg03(launcher: LocalLauncher, sets: dict[str, str], plan: str) -> None:
    alone = steps(launcher, "dp=1", TRAPS, 5, sets=sets)[0]
    for rank in steps(launcher, plan, TRAPS, 5, sets=sets):
        for here, there in zip(rank["outcomes"], alone["outcomes"], strict=True):
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-12)
            assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-11)


def refusal(launcher: LocalLauncher, plan: str, apart: bool = False, **sets: Any) -> str:
    payload = {"task": TRAPS, "plan": plan, "num_steps": 5, "sets": sets, "apart": apart}
    job = Job("engine_entries:steps", payload, Plan.parse(plan).world_size, python_path=(HELPERS,))
    failure = launcher.run(job).failure
    assert failure is not None and failure.kind == "user", failure
    return failure.text


def test_ranks_that_would_compute_with_each_others_layers_are_stopped_hg03(launcher: LocalLauncher) -> None:
    assert "in different orders" in refusal(launcher, "dp=2,zero=3", True, kind="experts", length=2, batch=2)


def test_a_gradient_in_parts_is_not_lost_in_silence_where_it_is_sharded(launcher: LocalLauncher) -> None:
    assert "in several parts within one backward" in refusal(launcher, "dp=2,zero=3", True, kind="reentrant")


def test_a_part_of_the_model_in_a_closure_is_refused(launcher: LocalLauncher) -> None:
    assert "the function in act holds a part of the model" in refusal(launcher, "dp=1", kind="closure")


def test_a_hook_on_a_gradient_is_refused(launcher: LocalLauncher) -> None:
    assert "leave.weight has a gradient hook" in refusal(launcher, "dp=1", kind="hook")


@pytest.mark.parametrize("plan", ["dp=2", "dp=1,microbatches=2", "dp=2,zero=3"])
def test_a_table_that_looks_at_the_whole_batch_is_refused_where_it_is_cut(launcher: LocalLauncher, plan: str) -> None:
    assert "table has max_norm" in refusal(launcher, plan, kind="max_norm")
    assert "table has scale_grad_by_freq" in refusal(launcher, plan, kind="frequencies")
    assert steps(launcher, "dp=1", TRAPS, 2, sets={"kind": "max_norm"})[0]["failed"] is None


@pytest.mark.alone
def test_a_new_worker_reaches_its_first_sharded_backward_at_once(launcher: LocalLauncher) -> None:
    seconds = []
    for _ in range(6):
        sets = {**TINY, "precision": "fp32"}
        found = run(launcher, "first_backward", 2, prepare="prepare", task=GPT, plan="dp=2,zero=3", sets=sets)
        seconds.append(max(rank["seconds"] for rank in found))
    print(f"from fork to the end of the first sharded backward, least of six: {min(seconds):.3f} s of {seconds}")
    assert min(seconds) < 0.3


@pytest.mark.parametrize("apart", [False, True])
def test_zero_3_keeps_no_more_than_its_share(launcher: LocalLauncher, apart: bool) -> None:
    sets = {"depth": 4, "width": 256, "heads": 4, "context": 32, "batch": 2}
    asked = {"task": GPT, "plan": "dp=2,zero=3", "sets": sets, "apart": apart}
    for rank in run(launcher, "storages", 2, prepare="prepare", **asked):
        assert rank["bytes"] == pytest.approx(rank["whole"] / 2, rel=0.05)
