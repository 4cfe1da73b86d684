"""A hang costs one sentence: seeded hangs of real workers, over shared memory and over Gloo, rank 1 to blame."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import short_of_grace
from stretto.elastic.coordinator import Graces
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
STUCK = ROOT / "tests" / "tasks" / "stuck.py"
LIMIT = 1.0
BACKENDS = pytest.mark.parametrize("over", ["shared", "gloo"])
RANK_1 = r"rank 1 \(member m2, dp_replicate=1\) "
WAITING = {
    "shared": r", while ranks 0, 2 wait in all_reduce no\. 7 \(1 x 100 bytes of float32, sum\)",
    "gloo": r", while ranks 0, 2 wait in the reduction of gradients \(call no\. 7\)",
}
SAME = r"; every rank must make the same calls in the same order"
SLOW = r"; where that is only slow, --hang-after SECONDS waits longer"


@pytest.fixture(scope="module")
def launcher(launcher: LocalLauncher) -> Iterator[LocalLauncher]:
    with short_of_grace(launcher, Graces(0.3, 0.3, 1.0)):
        yield launcher


def start(
    launcher: LocalLauncher, run: Path, over: str, how: str, plan: str = "dp=3", limit: float = LIMIT
) -> JobResult:
    """Trains until rank 1 is stuck as ``how`` says; that must not take long."""
    run.mkdir()
    order = TrainOrder(str(STUCK), {"how": how}, plan, "test", str(run))
    job = Job(
        f"hang_entries:{over}",
        order.to_payload(),
        Plan.parse(plan).world_size,
        prepare="stretto.training:prepare",
        hang_after=limit,
        log_dir=run / "logs",
        python_path=(str(ROOT / "tests" / "helpers"),),
    )
    began = time.monotonic()
    result = launcher.run(job, on_output=lambda text: None)
    assert time.monotonic() - began < 20
    return result


def told(result: JobResult) -> str:
    """The one line that a hang of rank 1's costs."""
    assert result.failure is not None and result.failure.rank == 1, result.failure
    assert result.failure.member == "m2" and result.failure.coordinates == "dp_replicate=1"
    return str(result.failure)


def hang(result: JobResult, *pattern: str) -> None:
    line = told(result)
    assert result.exit_code == 1 and result.failure is not None and result.failure.kind == "hang"
    assert re.fullmatch(rf"nothing has moved for {LIMIT:g} s: {''.join(pattern)}", line), line


# --------------------------------------------------------------------------------------- a pipeline

GRADIENTS = r"the receipt of microbatch \d's gradients from stage 1"


def test_a_message_that_was_never_sent_is_its_senders_fault(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = start(launcher, tmp_path / "run", "shared", "unsent", plan="pp=2,microbatches=4")
    assert result.failure is not None and (result.failure.rank, result.failure.coordinates) == (0, "pp=0")
    assert re.fullmatch(
        rf"nothing has moved for {LIMIT:g} s: rank 0 \(member m1, pp=0\) has not sent what rank 1 waits for, the receipt of "
        rf"microbatch 2's values from stage 0, and has gone on: it waits in {GRADIENTS}, in step 3, microbatch \d, at "
        rf"\S+ in _work \(there stretto/parallel/pipeline\.py:\d+ in take\){SLOW}",
        str(result.failure),
    ), str(result.failure)


def test_a_stage_that_does_not_come_is_named_with_what_the_others_wait_for(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    result = start(launcher, tmp_path / "run", "shared", "stop", plan="pp=2,microbatches=4")
    assert result.failure is not None and (result.failure.rank, result.failure.coordinates) == (1, "pp=1")
    last = r"is stopped \(.*\); it was last in step 1, microbatch 3"
    waiting = rf", while rank 0 waits in {GRADIENTS}"
    line = str(result.failure)
    assert re.fullmatch(rf"nothing has moved for {LIMIT:g} s: rank 1 \(member m2, pp=1\) {last}{waiting}{SLOW}", line), line


# ------------------------------------------------------------------------- a rank that does not come


@BACKENDS
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_rank_asleep_over_its_samples(launcher: LocalLauncher, tmp_path: Path, over: str, loaders: int) -> None:
    result = start(launcher, tmp_path / "run", over, "loader", f"dp=3,loaders={loaders}")
    place = r"stands in step 3, microbatch 1, at \S*stuck\.py:\d+ in __getitem__"
    if loaders:
        place = r"waits in step 3, microbatch 1 for its loaders, which owe it samples \d+, \d+"
    hang(result, RANK_1, place, WAITING[over], SLOW)
    assert (tmp_path / "run" / "logs" / "member-m2.log").read_text().endswith(f"{result.failure}\n"), "kept in its log"


@BACKENDS
def test_a_rank_that_is_stopped(launcher: LocalLauncher, tmp_path: Path, over: str) -> None:
    last = r"is stopped \(by SIGSTOP or a debugger; SIGCONT lets it go on\); it was last in step 3, microbatch 1"
    hang(start(launcher, tmp_path / "run", over, "stop"), RANK_1, last, WAITING[over], SLOW)


def test_a_rank_that_holds_the_interpreters_lock(launcher: LocalLauncher, tmp_path: Path) -> None:
    last = r"does not answer \(a call .* never returns\?\); it was last in step 3, microbatch 1"
    hang(start(launcher, tmp_path / "run", "shared", "block"), RANK_1, last, WAITING["shared"], SLOW)


@BACKENDS
def test_a_rank_that_has_ended_costs_no_wait(launcher: LocalLauncher, tmp_path: Path, over: str) -> None:
    line = told(start(launcher, tmp_path / "run", over, "leave", limit=60))
    ended = "member m2 (rank 1) ended with exit code 7 before its work was done; it was in step 3, microbatch 1"
    assert line == f"rank 1 (member m2, dp_replicate=1) failed:\n{ended}"


@BACKENDS
def test_a_rank_that_raises_is_no_hang(launcher: LocalLauncher, tmp_path: Path, over: str) -> None:
    line = told(start(launcher, tmp_path / "run", over, "raise", limit=60))
    assert line.startswith("rank 1 (member m2, dp_replicate=1) failed:\nTraceback")
    assert line.endswith("RuntimeError: a planted fault") and "in _raise" in line


# ----------------------------------------------------------- a rank that makes other calls than the rest
# Over shared memory each call says what it is, so that a wrong one ends at once, with the traceback of whoever made it.


def differs(result: JobResult, mine: str, others: str) -> str:
    """The traceback of the odd rank, which makes the call ``mine``."""
    line = told(result)
    last = rf"\n\S+CallsDiffer: rank 1 is in {mine}, but ranks 0, 2 in {others}{SAME}"
    assert re.search(last + "$", line), line
    return line


def test_a_rank_that_skips_a_collective_hg07(launcher: LocalLauncher, tmp_path: Path) -> None:
    line = differs(
        start(launcher, tmp_path / "run", "shared", "skip", limit=60), r"all_reduce no\. 8 .*", r"barrier no\. 8"
    )
    assert "in _vote" in line
    hang(
        start(launcher, tmp_path / "gloo", "gloo", "skip"),
        RANK_1,
        r"waits in all_reduce \(call no\. 8\), voting on step 3, at .*step\.py:\d+ in _vote\)",
        r", while ranks 0, 2 wait in barrier \(call no\. 8\), reducing the gradients of step 3",
        rf", at \S*hang_entries\.py:\d+ in <lambda>{SAME}{SLOW}",
    )


def test_a_rank_with_another_order_of_calls(launcher: LocalLauncher, tmp_path: Path) -> None:
    line = differs(
        start(launcher, tmp_path / "run", "shared", "order", limit=60), r"barrier no\. 8", r"all_reduce no\. 8 .*"
    )
    assert re.search(r"hang_entries\.py\", line \d+, in <lambda>", line)
    hang(
        start(launcher, tmp_path / "gloo", "gloo", "order"),
        RANK_1,
        r"waits in barrier \(call no\. 8\), reducing the gradients of step 3, at \S*hang_entries\.py:\d+ in <lambda>",
        rf", while ranks 0, 2 wait in all_reduce \(call no\. 8\), voting on step 3, at .*_vote\){SAME}{SLOW}",
    )


def aborted(result: JobResult, mine: str, others: str) -> None:
    """Gloo ends the process of whoever gets more than it asked for; the line names who sent it."""
    line = told(result)
    assert result.exit_code == 134
    sizes = r": calls of different sizes met, so Gloo ended rank [02] \(SIGABRT\)"
    assert re.fullmatch(rf"{RANK_1}was {mine}, while ranks 0, 2 were {others}{sizes}{SAME}", line), line


def test_a_rank_that_calls_with_another_shape(launcher: LocalLauncher, tmp_path: Path) -> None:
    line = differs(
        start(launcher, tmp_path / "run", "shared", "shape", limit=60),
        r"all_reduce no\. 8 \(1 x 4000 bytes of float32, sum\)",
        r"all_reduce no\. 8 \(1 x 104 bytes of float64, sum\)",
    )
    assert re.search(r"hang_entries\.py\", line \d+, in <lambda>", line)
    result = start(launcher, tmp_path / "gloo", "gloo", "shape", limit=60)
    aborted(result, "reducing the gradients of step 3", "voting on step 3")


def test_a_rank_that_runs_one_microbatch_less(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Where each sends its gradients; else nobody waits for it."""
    plan = "dp=3,zero=2,microbatches=2"
    line = differs(
        start(launcher, tmp_path / "run", "shared", "fewer", plan, limit=60),
        r"all_reduce no\. \d+ .*",
        r"reduce_scatter no\. \d+ .*",
    )
    assert "in _vote" in line
    result = start(launcher, tmp_path / "gloo", "gloo", "fewer", plan, limit=60)
    aborted(result, "voting on step 3", "in step 3, microbatch 2")


# ------------------------------------------------------------------------------------------ the limit


def test_nobody_is_ended_for_being_slow_within_the_limit_or_without_one(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    for limit in (20.0, 0.0):
        result = start(launcher, tmp_path / f"run-{limit:g}", "shared", "slow", limit=limit)
        assert result.exit_code == 0, result.failure


def test_the_command_takes_the_limit_and_the_sentence_is_the_last_line(tmp_path: Path) -> None:
    words = ["train", str(STUCK), "--workers", "2", "--set", "how=loader", "--hang-after", "1"]
    command = [str(Path(sys.executable).parent / "stretto"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55)
    assert done.returncode == 1, done.stderr
    last = (
        r"nothing has moved for 1 s: rank 1 .* stands in step 2, microbatch 1, at .* in __getitem__, .* waits longer\n"
    )
    assert re.fullmatch(last, done.stderr), done.stderr
