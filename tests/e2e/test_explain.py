"""``stretto explain``: what a plan cuts of a model, before anything is launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def explain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", "explain", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_each_parameter_is_listed_with_its_reason() -> None:
    told = explain("examples/gpt", "--plan", "tp=3", "--set", "depth=1", "--json")
    assert told.returncode == 0, told.stderr
    rows = {row["name"]: row for row in json.loads(told.stdout)["parameters"]}
    fused = rows["blocks.0.query_key_value.weight"]
    assert (fused["why"], fused["share"]) == ("dimension 0 cut along an axis of 3", 1 / 3)
    assert rows["embedding.weight"]["share"] == 1
    assert "an embedding looks its rows up" in rows["embedding.weight"]["why"]


def test_a_plan_that_cuts_nothing_is_one_line() -> None:
    told = explain("examples/gpt", "--plan", "dp=2")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("stretto: plan dp=2: explain tells what tp cuts")
