"""Predicted before, measured after, on this machine: plans of several tasks on two workers.

    python benchmarks/planner/here.py [--steps 12] [--rounds 3] [--out FILE]

For each task the links are measured, then every plan is rehearsed (each rank's part runs alone), then every plan is
trained for real, as ``stretto train`` does. Rounds are interleaved: a round rehearses all plans and then trains all.
A plan's figures are the medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.doctor.links import measure_links
from stretto.launch import LocalLauncher
from stretto.launch.job import Job
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.planner.tables import LinkTable
from stretto.preload import preloads
from stretto.rehearse import Rehearsals

ROOT = Path(__file__).resolve().parents[2]
PLANS = (
    *("dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"),
    *("pp=2,microbatches=4", "pp=2,microbatches=4,schedule=gpipe"),
)
GPT = {"depth": "6", "width": "384", "heads": "6", "context": "128", "batch": "8"}
CASES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gpt", "examples/gpt", GPT),
    (
        "bert",
        "tests/tasks/bert.py",
        {"depth": "6", "width": "512", "heads": "8", "length": "30", "size": "200", "batch": "24"},
    ),
    (
        "vit",
        "tests/tasks/vit.py",
        {"side": "32", "patch": "4", "width": "256", "depth": "6", "heads": "8", "size": "200", "batch": "32"},
    ),
)
WARM = 2


def measured(launcher: LocalLauncher, path: str, plan: str, sets: dict[str, str], steps: int) -> tuple[float, float]:
    """Median seconds of a step, and the peak in bytes, of a real run."""
    with tempfile.TemporaryDirectory() as folder:
        order = TrainOrder(
            task=str(ROOT / path), run=folder, plan=plan, plan_origin="", sets={**sets, "steps": str(steps + WARM)}
        )
        job = Job(
            entry="timed:work",
            payload=asdict(order),
            num_workers=Plan.parse(plan).world_size,
            prepare="stretto.training:prepare",
            python_path=(str(Path(__file__).parent),),
            log_dir=Path(folder),
        )
        result = launcher.run(job, on_output=lambda line: None)
        found = next(iter(result.results.values()), None)
        if found is None:
            raise SystemExit(f"{path} {plan}: {result.failure}")
        return statistics.median(found["seconds"][WARM:]), float(found["peak_bytes"])


def case(
    launcher: LocalLauncher, kind: tuple[str, str, dict[str, str]], links: LinkTable, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Each plan of a task."""
    name, path, sets = kind
    rehearsals = Rehearsals.of(ROOT / path, {**sets, "steps": "20"})
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.rounds):
        for plan in PLANS:
            one = rehearsals.run(Plan.parse(plan))
            if one.refused:
                print(f"{name} {plan}: {one.refused}")
                continue
            found[plan]["predicted"].append(one.play(links).seconds)
            found[plan]["predicted_bytes"].append(float(max(one.memory_bytes)))
        for plan in list(found):
            seconds, peak = measured(launcher, path, plan, sets, options.steps)
            found[plan]["measured"].append(seconds)
            found[plan]["measured_bytes"].append(peak)
    rows = []
    for plan, figures in found.items():
        row = {"task": name, "plan": plan, **{key: statistics.median(values) for key, values in figures.items()}}
        row["time_error"] = row["predicted"] / row["measured"] - 1
        row["memory_error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        print(
            f"{name:<6} {plan:<36} {1e3 * row['predicted']:8.1f} ms predicted {1e3 * row['measured']:8.1f} measured "
            f"{row['time_error']:+7.1%}   {row['predicted_bytes'] / 1e6:7.0f} MB {row['measured_bytes'] / 1e6:7.0f} "
            f"{row['memory_error']:+7.1%}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Runs all, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = [kind for kind in CASES if options.only in (None, kind[0])]
    with LocalLauncher(preloads(Plan.parse("dp=2,zero=3"))) as launcher:
        links = measure_links(2, launcher)
        rows = [row for kind in kinds for row in case(launcher, kind, links, options)]
    errors = [abs(row["time_error"]) for row in rows]
    print(f"{len(rows)} plans: step time off by {statistics.mean(errors):.1%} in the mean")
    print(f"peak memory off by {statistics.mean(abs(row['memory_error']) for row in rows):.1%} in the mean")
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name]
        chosen, best = min(mine, key=lambda row: row["predicted"]), min(mine, key=lambda row: row["measured"])
        print(f"{name}: chosen {chosen['plan']}, {chosen['measured'] / best['measured'] - 1:.1%} over {best['plan']}")
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": rows, "links": links.to_json()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
