"""`stretto plan TASK`, `stretto doctor` and `--plan auto`, as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = str(ROOT / "tests" / "tasks" / "line.py")
SETS = ("--set", "steps=9")

pytestmark = pytest.mark.timeout(150)  # a first start loads torch from a cold disk


def stretto(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    command = [sys.executable, "-m", "stretto", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


def good(folder: Path, *words: str) -> str:
    done = stretto(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_nothing_is_said_it_is_planned_briefly_and_the_next_run_learns(tmp_path: Path) -> None:
    told = good(tmp_path, "train", LINE, *SETS)
    assert told.startswith("looking for a plan ...") and "plan dp=1: one worker takes about" in told
    assert "a step was predicted to take" in told and "dp=1  (planner)" in told
    forecast = json.loads((tmp_path / "runs" / "line" / "summary.json").read_text())["forecast"]
    assert 0 < forecast["step_seconds"] < 50 * forecast["measured_step_seconds"]
    assert 0.5 < forecast["memory_bytes"] / forecast["measured_memory_bytes"] < 2
    again = good(tmp_path, "train", LINE, "--plan", "auto", "--workers", "1", *SETS)
    assert "plan dp=1: the best of 1 plans; predictions are corrected by 1 earlier run(s): work x" in again


def test_what_a_task_raises_is_told_by_the_run_and_not_by_the_planner(tmp_path: Path) -> None:
    text = Path(LINE).read_text()
    (tmp_path / "task.py").write_text(text.replace("    context = current()\n", "    raise ZeroDivisionError\n"))
    done = stretto(tmp_path, "train", "task.py", *SETS)
    assert done.returncode == 1 and "it could not be planned" in done.stdout
    assert done.stderr.rstrip().endswith("ZeroDivisionError") and "rank 0" in done.stderr


@pytest.mark.matrix  # its parts are tested each for itself
def test_the_doctor_keeps_a_file_that_a_plan_is_made_with(tmp_path: Path) -> None:
    found = json.loads(stretto(tmp_path, "doctor", "--workers", "2", "-o", "here.yaml", "--json").stdout)
    assert {check["name"] for check in found["checks"]} >= {"disk", "ports"} and found["workers"] == 2
    one = ("plan", LINE, "--on", "here.yaml", *SETS)
    best = json.loads(good(tmp_path, *one, "--explain", "dp=2,zero=1", "--json"))["plans"]
    assert [plan["plan"] for plan in best] == ["dp=2,zero=1"] and best[0]["step_seconds"] > 0
    none = stretto(tmp_path, *one, "--explain", "dp=2", "--memory", "1MB")
    assert none.returncode == 2 and "100%" in none.stdout
    assert none.stderr.splitlines()[-1].startswith("stretto: none fits: ")
    refused = stretto(tmp_path, *one, "--explain", "branch=2")
    assert refused.returncode == 2 and not refused.stdout and "finds no towers" in refused.stderr
    assert "was measured with 2 worker(s)" in stretto(tmp_path, *one, "--explain", "dp=3").stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan",), "expected a TASK, --model MODEL.yaml"),
        (("plan", LINE, "--check", "rows.jsonl"), "give one of them"),
        (("plan", "--workers", "2", "--check", "rows.jsonl"), "are for a TASK"),
        (("plan", LINE, "--days", "3"), "--days is for --model"),
        (("plan", LINE, "--price", "0"), "expected dollars over 0"),
        (("plan", LINE, "--memory", "lots"), "expected a size such as 2GiB"),
        (("plan", LINE, "--on", "nowhere.yaml"), "nowhere.yaml can't be read"),
        (("plan", LINE, "--explain", "dpp=2"), "unknown key 'dpp'"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = stretto(tmp_path, *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.matrix
def test_a_plan_is_told_with_its_parts_and_its_price_and_drawn(tmp_path: Path) -> None:
    words = ("plan", LINE, "--workers", "1", "--batch", "4", "--explain", "dp=1", "--price", "3600", *SETS)
    found = json.loads(good(tmp_path, *words, "--picture", "plan.svg", "--json"))
    (plan,) = found["plans"]
    assert found["samples_per_second"] == pytest.approx(4 / plan["step_seconds"])
    assert (
        found["epoch_dollars"] == pytest.approx(3600 * found["epoch_hours"]) == pytest.approx(16 * plan["step_seconds"])
    )
    assert 0 < plan["memory_bytes_laid_out"] <= plan["memory_bytes"] >= plan["memory_bytes_kept"] > 0
    assert (tmp_path / "plan.svg").read_text().count("<circle") == 1
    text = good(tmp_path, *words)
    assert (
        "take --plan dp=1" in text and "within a step" in text and "links twice as fast" in text and "dollars" in text
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_one_signal_ends_what_is_measured_and_looked_at(tmp_path: Path, number: signal.Signals) -> None:
    words = ("train", LINE, "--plan", "auto", "--workers", "2", *SETS)
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "looking for a plan ...\n"
    time.sleep(4)  # links are measured, or plans looked at, for much longer
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + number and told.splitlines()[-1] == "stretto: interrupted"
    assert not list((tmp_path / "runs").glob("*"))


def test_a_mistake_in_a_task_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(Path(LINE).read_text().replace("TensorDataset(x, torch.sin(2 * x))", "[]"))
    done = stretto(tmp_path, "plan", "task.py", "--explain", "dp=1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "empty" in done.stderr
