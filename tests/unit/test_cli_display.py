"""What the command line shows for given events, without a process."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from stretto.cli.display import Display
from stretto.cli.words import MAX_PLAN_LINES, clock, count, duration, fold, held_out, number, plan_lines, size

ROWS: list[list[Any]] = [
    ["task", "file", "somewhere/task.py", "command"],
    *[["settings", f"setting_{place}", place, "task default"] for place in range(40)],
    ["settings", "chosen", 3e-4, "--set"],
    *[["recipe", f"field_{place}", None, origin] for place, origin in enumerate(("default", "task", "--set") * 9)],
    ["plan", "dp", 2, "--plan"],
    ["plan", "zero", 0, "default"],
    ["cluster", "memory_bytes", 2**34, "measured"],
]
SUMMARY = {"final_loss": math.nan, "steps": 6, "samples": 60, "wall_seconds": 1.5, "plan": "dp=1", "world_size": 1}
SUMMARY |= {"peak_bytes": 2**20, "skipped_steps": 5, "finished": True, "evaluation": None, "run": "runs/x"}
SUMMARY["best"] = {"metric": "auc", "order": "highest", "value": 0.75, "step": 4, "path": "checkpoints/step-00000004"}


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_the_plan_has_twelve_lines_at_most_and_every_origin(width: int) -> None:
    lines = plan_lines(ROWS, "runs/x", width)
    assert len(lines) <= MAX_PLAN_LINES
    assert {line.origin for line in lines} >= {"--set", "task default", "default", "task", "--plan", "measured"}
    sections = [line.section for line in lines if line.section]
    assert sections == ["task", "settings", "recipe", "plan", "cluster", "run"]
    first = next(line for line in lines if line.section == "settings")
    assert (first.text, first.origin) == ("chosen=0.0003", "--set")  # what was chosen comes first
    if width == 400:
        assert not any("more" in line.text for line in lines)
    if width == 40:
        assert any("more" in line.text for line in lines)


def test_fold_counts_what_has_no_room() -> None:
    assert fold(["aa", "bb", "cc", "dd"], 5, 1) == ["aa bb … 2 more"]
    assert fold(["aa", "bb", "cc", "dd"], 5, 2) == ["aa bb", "cc dd"]


def test_numbers_in_words() -> None:
    assert [clock(seconds) for seconds in (0, 0.2, 92, 3725)] == ["0:00", "0:01", "1:32", "1:02:05"]
    assert [duration(seconds) for seconds in (6.12, 3725)] == ["6.1 s", "1:02:05"]
    assert [size(value) for value in (12, 2048, 16_986_931, 2**35)] == ["12 B", "2.0 KiB", "16 MiB", "32 GiB"]
    assert [count(value) for value in (7, 7.25, 41_200.4)] == ["7", "7.2", "41,200"]
    assert [number(value) for value in (None, math.nan, 1.5, 12_345.67, 3e-6)] == [
        *("nan", "nan", "1.5000", "12,345.7", "3.00e-06")
    ]


def test_metrics_stand_beside_baselines() -> None:
    assert held_out({"loss": 1.88, "bits_per_byte": 2.71}, {"order-0 entropy": 4.78, "xz": 2.31}, 1000) == [
        "held out       step 1,000    beside it",
        "loss               1.8800    order-0 entropy    4.7800",
        "bits_per_byte      2.7100    xz                 2.3100",
    ]


def tell(display: Display) -> None:
    display.on_event("m1", {"kind": "start", "first_step": 1, "steps": 6, "unit": "tokens", "world_size": 1})
    for step in range(1, 7):
        skipped = "the gradient is not finite" if step > 1 else None
        event = {"step": step, "loss": math.nan, "metrics": {}, "weight": 10.0, "samples": 10, "seconds": 0.1}
        display.on_event("m1", {"kind": "step", **event, "skipped": skipped})
    display.on_event("m1", {"kind": "of a later version"})
    display.on_event("m1", {"kind": "summary", **SUMMARY})


def test_skipped_steps_are_said_and_many_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        tell(display)
    out = capsys.readouterr().out
    assert out.count("was skipped: the gradient is not finite") == 3
    assert "step 4 was skipped: the gradient is not finite; further ones are only counted" in out
    assert "5 steps skipped" in out
    assert "step 6/6  loss nan  100 tokens/s" in out


def test_a_quiet_display_prints_the_summary_alone_as_json_that_any_reader_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display(quiet=True) as display:
        display.starting(2)
        display.on_event("host", {"kind": "resolved", "rows": ROWS, "run": "runs/x"})
        display.on_output("printed by the task\n")
        tell(display)
        display.next_commands([("stretto audit runs/x", "")])
    captured = capsys.readouterr()
    assert json.loads(captured.out, parse_constant=pytest.fail) == {**SUMMARY, "final_loss": None}
    assert "printed by the task" in captured.err
    assert captured.out.count("\n") == 1
