"""What runs teach the planner: predictions come nearer, one run is not believed whole, corrections don't pile up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.corrections import NEWEST, Corrections, corrections_of, learn, machine


def forecast(work: float, waits: float, corrected: Corrections | None = None, memory: float = 1e9) -> dict[str, Any]:
    """Of a machine that works in 1.25 of the time that was predicted and waits in half of it, with a tenth more."""
    factors = corrected or Corrections()
    return {
        "step_seconds": factors.seconds(work, waits),
        "work_seconds": factors.work * work,
        "memory_bytes": factors.memory * memory,
        "measured_step_seconds": 1.25 * work + 0.5 * waits,
        "measured_memory_bytes": 1.1 * memory,
        "corrected": factors.to_json(),
        "machine": machine(),
    }


MANY = [(1.0, 0.0), (1.0, 2.0), (0.5, 4.0), (3.0, 1.0), (2.0, 6.0), (0.2, 3.0)]


def test_work_and_waiting_are_told_apart_and_nothing_is_learnt_of_nothing() -> None:
    learnt = learn([forecast(*each) for each in MANY])
    assert learnt.work == pytest.approx(1.25, rel=0.06) and learnt.waits == pytest.approx(0.5, rel=0.15)
    assert learnt.memory == pytest.approx(1.1, rel=0.02) and learnt.runs == len(MANY)
    assert learn([]) == Corrections() and Corrections().seconds(2.0, 3.0) == 5.0


def test_one_run_is_believed_in_part() -> None:
    learnt = learn([forecast(1.0, 0.0, memory=1e9)])
    assert 1.2 < learnt.work < 1.24 and learnt.waits == pytest.approx(1.0) and 1.08 < learnt.memory < 1.1


def test_a_tiny_run_says_little_of_larger_ones() -> None:
    tiny = {**forecast(1e-4, 0.0, memory=1e5), "measured_step_seconds": 1e-3}
    learnt = learn([tiny, forecast(0.5, 0.0, memory=1e9)])
    assert 1.2 < learnt.work < 1.4 and learnt.memory == pytest.approx(1.1, rel=0.02)


def test_what_was_corrected_before_is_taken_out_first() -> None:
    before = Corrections(1.2, 0.6, 1.09, 3)
    again, plain = (learn([forecast(*each, factors) for each in MANY]) for factors in (before, None))
    assert again.to_json() == pytest.approx(plain.to_json())


def test_the_newest_runs_of_this_machine_count_and_what_cannot_be_read_does_not(tmp_path: Path) -> None:
    def keep(name: str, text: str, age: int) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text, encoding="utf-8")
        os.utime(tmp_path / name / "summary.json", (1e9 - age, 1e9 - age))

    assert corrections_of(tmp_path / "nowhere") == corrections_of(tmp_path) == Corrections()
    good = forecast(0.1, 0.0)
    for name, text in {
        "none": "{}",
        "torn": "{",
        "other": json.dumps({"forecast": {**good, "machine": "another"}}),
        "short": json.dumps({"forecast": {**good, "measured_step_seconds": None}}),
        "nan": json.dumps({"forecast": {**good, "memory_bytes": float("nan")}}),
        "zero": json.dumps({"forecast": {**good, "corrected": {"work": 0, "waits": 1, "memory": 1, "runs": 1}}}),
        "words": json.dumps({"forecast": {**good, "corrected": {"work": "1"}}}),
    }.items():
        keep(name, text, age=0)
    assert corrections_of(tmp_path) == Corrections()
    for run in range(NEWEST):
        keep(f"run-{run}", json.dumps({"forecast": good}), age=1 + run)
    keep("old", json.dumps({"forecast": {**good, "measured_step_seconds": 50.0}}), age=100)
    assert corrections_of(tmp_path) == learn([good] * NEWEST)
