"""What a run tells of its time: a trace of its last steps, and of a pipeline how long its stages waited."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETS = ("depth=1", "width=16", "heads=2", "context=8", "batch=6", "steps=10")


def test_a_pipeline_leaves_a_lane_a_rank_and_its_bubble_beside_the_schedules(tmp_path: Path) -> None:
    sets = [word for one in SETS for word in ("--set", one)]
    command = [sys.executable, "-m", "stretto", "train", "examples/gpt", "--plan", "pp=2,microbatches=3", *sets]
    told = subprocess.run(
        [*command, "--run", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["pipeline"]
    assert found["schedule"] == "1f1b" and 0 < found["bubble"] < 1 and 0 < found["bubble_of_schedule"] < 1
    assert f"stages waited for {found['bubble']:.0%} of the time" in told.stdout
    (file,) = (tmp_path / "run" / "trace").iterdir()
    assert file.name == "steps-00000003-00000010.json", "the last eight"
    events = [one for one in json.loads(file.read_text(encoding="utf-8"))["traceEvents"] if one["ph"] == "X"]
    seen: dict[tuple[int, str], int] = {}
    for event in events:
        seen[event["tid"], event["cat"]] = seen.get((event["tid"], event["cat"]), 0) + 1
    for rank in (0, 1):
        assert seen[rank, "forward"] == seen[rank, "backward"] == 8 * 3
        assert seen[rank, "reduce"] == seen[rank, "update"] == 8
    assert seen[1, "receive"] == 8 * 3 and seen[0, "send"] == 8 * 3
    for rank in (0, 1):
        spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in events if one["tid"] == rank)
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(spans)), "none overlap"
    first, second = ([one["ts"] for one in events if (one["tid"], one["name"]) == (s, f"F{s}.0")] for s in (0, 1))
    assert all(before < after for before, after in zip(first, second, strict=True)), "on one clock"
