"""What a run takes in time and memory on other allocators than glibc's, which is the measure.

    python benchmarks/memory/allocators.py [--rounds 3] [--steps 40] [NAME=LIBRARY ...]

Each library is preloaded into the fork server, as stretto does with tcmalloc. All arms take their turns in each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from stretto.launch.allocator import allocator_library

PLANNER = Path(__file__).resolve().parents[1] / "planner"
PLANS = (
    ("gpt", "dp=2"),
    ("gpt", "tp=2"),
    ("gpt", "pp=2,microbatches=4"),
    ("bert", "tp=2"),
    ("vit", "dp=2,zero=3"),
)
TIMED = 12


def arm(steps: int) -> None:
    """In a process of its own: a line of JSON for each plan."""
    sys.path.insert(0, str(PLANNER))
    from functools import partial

    from here import CASES, measured, on_this_host

    from stretto.launch import LocalLauncher
    from stretto.preload import preloads_of

    with LocalLauncher(preloads_of()) as launcher:
        for task, plan in PLANS:
            path, sets = CASES[task]
            launched = partial(on_this_host, launcher)
            found = measured(plan, sets, steps - TIMED, path=path, steps=TIMED, launcher=launched)
            print(json.dumps([task, plan, *found]), flush=True)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="NAME=LIBRARY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        arm(options.steps)
        return
    given = options.libraries or [f"tcmalloc={allocator_library()}"]
    arms = {"glibc": "", **dict(one.split("=", 1) for one in given)}
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    words = [sys.executable, __file__, "--arm", "--steps", str(options.steps)]
    for _ in range(options.rounds):
        for name, library in arms.items():
            ran = subprocess.run(words, env={**os.environ, "LD_PRELOAD": library}, capture_output=True, check=True)
            for task, plan, seconds, peak in map(json.loads, ran.stdout.splitlines()):
                found[task, plan][name].append((seconds, peak))
    print("| plan | allocator | step, over glibc's | peak, MB (least to most) | over glibc's |\n|---|---|---|---|---|")
    for (task, plan), by in found.items():
        for name, runs in by.items():
            step = statistics.median(mine[0] / glibc[0] for mine, glibc in zip(runs, by["glibc"], strict=True))
            peaks = sorted(peak / 1e6 for _, peak in runs)
            least = statistics.median(peaks) / statistics.median(peak / 1e6 for _, peak in by["glibc"])
            sizes = f"{statistics.median(peaks):.0f} ({peaks[0]:.0f} to {peaks[-1]:.0f})"
            print(f"| {task} `{plan}` | {name} | {step:.3f} | {sizes} | {least:.3f} |")


if __name__ == "__main__":
    main()
