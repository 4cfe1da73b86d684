"""How long the planner's search takes over its whole space, in new processes: the start of Python and imports count.

    python benchmarks/planner/search.py

Writes ``results.json`` beside it. Each figure is the median of five runs on one core, after one that isn't counted, in
which Python compiles what it loads, as it does once where a package is installed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

RUNS: Final = 5
WHERE: Final = Path(__file__).parent / "results.json"
# Devices, samples of a step, most seconds, and the model: GPT-3, Megatron-Turing NLG, and the largest of arXiv
# 2104.04473.
CASES: Final = {
    "175B": ("1024xA100", 1536, 1.0, {"layers": 96, "hidden": 12288, "heads": 96}),
    "530B": ("5120xA100", 2240, 5.0, {"layers": 105, "hidden": 20480, "heads": 128}),
    "1T": ("100000xA100", 6144, 60.0, {"layers": 128, "hidden": 25600, "heads": 160}),
}
REST: Final = {"vocab": 51200, "sequence": 2048}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """One case."""
    devices, batch, most, sizes = CASES[name]
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**sizes, **REST}.items()), encoding="utf-8")
    command = [sys.executable, "-m", "stretto", "plan", "--model", str(file), "--on", devices, "--batch", str(batch)]
    seconds, worked, found = [], [], {}
    for run in range(RUNS + 1):
        begin, before = time.perf_counter(), _worked()
        done = subprocess.run([*command, "--planned", "--json"], capture_output=True, text=True, check=True)
        seconds += [time.perf_counter() - begin] if run else []
        worked += [_worked() - before] if run else []
        found = json.loads(done.stdout)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "devices": devices,
        "batch": batch,
        "candidates": found["candidates"],
        "judged": found["judged"],
        "seconds": round(statistics.median(seconds), 3),
        "processor_seconds": round(statistics.median(worked), 3),
        "slowest_seconds": round(max(seconds), 3),
        "most_seconds": most,
        "peak_mib_so_far": round(peak),
        "best": found["plans"][0]["plan"],
    }


def _worked() -> float:
    """Seconds of a core that processes which have ended took: where others share the core, less than passed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measures, prints and writes."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        results = {name: measure(name, Path(folder)) for name in CASES}
    for name, one in results.items():
        kept = "within" if one["seconds"] <= one["most_seconds"] else "OVER"
        print(
            f"{name} on {one['devices']}: {one['candidates']:,} plans in {one['seconds']:.2f} s "
            f"({kept} {one['most_seconds']:g} s), {one['processor_seconds']:.2f} s of a core"
        )
    WHERE.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
