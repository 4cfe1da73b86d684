"""Peak memory of zero=3 against hand-written FSDP2, on a model of at least 100 million parameters, two workers.

    python benchmarks/memory/run.py [--rounds 3] [--out results.json]

Both start from the same fork server; each figure is the largest rank's peak resident memory less that after the
imports. FSDP2 is measured twice: built whole on every rank, and on the meta device; the smaller one is the bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from stretto.launch import Job, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.preload import preloads

HERE = Path(__file__).resolve().parent

TASK = str(HERE.parents[1] / "examples" / "gpt")
SETS = {"depth": 8, "width": 1024, "heads": 16, "context": 128, "batch": 2, "steps": 1000}
STEPS = 3  # Adam's state is there from the second on
PLAN = "dp=2,zero=3"


def stretto_peak(launcher: LocalLauncher) -> int:
    """``peak_bytes`` of a run of stretto; its checkpoint is part of the run."""
    with tempfile.TemporaryDirectory() as folder:
        order = TrainOrder(TASK, SETS, PLAN, "benchmark", folder, stop_after=STEPS)
        job = Job("stretto.training:work", order.to_payload(), 2, prepare="stretto.training:prepare")
        return _peak(launcher, job)


def hand_peak(launcher: LocalLauncher, how: str) -> int:
    """The same for FSDP2 by hand."""
    payload: dict[str, Any] = {"task": TASK, "sets": SETS, "plan": PLAN, "how": how, "steps": STEPS}
    return _peak(launcher, Job("arms:fsdp2", payload, 2, python_path=(str(HERE), str(HERE.parent))))


def _peak(launcher: LocalLauncher, job: Job) -> int:
    result = launcher.run(job)
    if result.failure is not None:
        sys.exit(result.failure.text)
    return max(int(found["peak_bytes"]) for found in result.results.values() if found)


def main() -> None:
    """Measures the arms in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arms: dict[str, list[int]] = {"stretto": [], "FSDP2, built whole": [], "FSDP2, meta": []}
    with LocalLauncher(preloads(Plan.parse(PLAN))) as launcher:
        for _ in range(options.rounds):
            arms["stretto"].append(stretto_peak(launcher))
            arms["FSDP2, built whole"].append(hand_peak(launcher, "real"))
            arms["FSDP2, meta"].append(hand_peak(launcher, "meta"))
    medians = {name: statistics.median(found) for name, found in arms.items()}
    best = min(value for name, value in medians.items() if name != "stretto")
    print("| arm | peak MiB (median) | stretto / arm |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value / 2**20:.0f} | {medians['stretto'] / value:.3f} |")
    print(f"stretto against the better FSDP2: {medians['stretto'] / best:.3f} (bar: at most 1.03)")
    if options.out:
        options.out.write_text(json.dumps({"settings": SETS, "plan": PLAN, "peaks": arms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
