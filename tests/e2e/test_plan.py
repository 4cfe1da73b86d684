"""`stretto plan TASK`, `stretto doctor` and `--plan auto`, as people type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_auto_takes_a_plan_and_says_how_well_it_was_predicted(tmp_path: Path) -> None:
    told = good(tmp_path, "train", LINE, "--plan", "auto", "--workers", "1", "--run", "auto", *SETS)
    assert "a step was predicted to take" in told and "planner" in told
    forecast = json.loads((tmp_path / "auto" / "summary.json").read_text())["forecast"]
    assert 0 < forecast["step_seconds"] < 50 * forecast["measured_step_seconds"]
    assert 0 < forecast["memory_bytes"] < forecast["measured_memory_bytes"], "a run evaluates and saves as well"


@pytest.mark.matrix  # its parts are tested each for itself
def test_the_doctor_keeps_a_file_that_a_plan_is_made_with(tmp_path: Path) -> None:
    found = json.loads(stretto(tmp_path, "doctor", "--workers", "2", "-o", "here.yaml", "--json").stdout)
    assert {check["name"] for check in found["checks"]} >= {"disk", "ports"} and found["workers"] == 2
    one = ("plan", LINE, "--on", "here.yaml", *SETS)
    best = json.loads(good(tmp_path, *one, "--explain", "dp=2,zero=1", "--json"))["plans"]
    assert [plan["plan"] for plan in best] == ["dp=2,zero=1"] and best[0]["step_seconds"] > 0
    text = good(tmp_path, *one, "--explain", "dp=2", "--memory", "1MB")
    assert "none fits" in text and "100%" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan",), "expected a TASK, --model MODEL.yaml"),
        (("plan", LINE, "--check", "rows.jsonl"), "give one of them"),
        (("plan", "--workers", "2", "--check", "rows.jsonl"), "are for a TASK"),
        (("plan", LINE, "--memory", "lots"), "expected a size such as 2GiB"),
        (("plan", LINE, "--on", "nowhere.yaml"), "nowhere.yaml can't be read"),
        (("plan", LINE, "--explain", "dpp=2"), "unknown key 'dpp'"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = stretto(tmp_path, *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
