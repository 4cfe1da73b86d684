"""Predicted before, measured after, on this machine: plans of several tasks on two workers.

    python benchmarks/planner/here.py [--steps 12] [--rounds 3] [--long 0] [--out FILE] [--rate 200mbit]

For each task the links are measured, then every plan is rehearsed (each rank's part runs alone), then every plan is
trained for real, as ``stretto train`` does. Rounds are interleaved: a round rehearses all plans and then trains all. A
plan's times are the medians over rounds, its peak of memory is that of the last round: a heap grows for many steps, so
with ``--long`` that round goes on for so many more, which are not timed. Each task has a process of its own, so that
none begins with what another has imported.

With ``--rate`` the last task's workers are on two hosts with a link of that speed between them; this needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from apart import links_between, run_apart, two_hosts

from stretto.cluster import Cluster
from stretto.doctor.links import measure_links
from stretto.launch import LocalLauncher
from stretto.launch.allocator import allocator_variables
from stretto.launch.job import Job, result_of
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.planner.tables import LinkTable
from stretto.preload import preloads_of

ROOT = Path(__file__).resolve().parents[2]
PLANS = (
    *("dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"),
    *("pp=2,microbatches=4", "pp=2,microbatches=4,schedule=gpipe"),
)
GPT = {"depth": "6", "width": "384", "heads": "6", "context": "128", "batch": "8"}
LARGE = {"depth": "8", "width": "640", "heads": "10", "context": "128", "batch": "8"}
CASES: Mapping[str, tuple[str, dict[str, str]]] = MappingProxyType(
    {
        "gpt": ("examples/gpt", GPT),
        "bert": (
            "tests/tasks/bert.py",
            {"depth": "6", "width": "512", "heads": "8", "length": "30", "size": "200", "batch": "24"},
        ),
        "vit": (
            "tests/tasks/vit.py",
            {"side": "32", "patch": "4", "width": "256", "depth": "6", "heads": "8", "size": "200", "batch": "32"},
        ),
        "large gpt": ("examples/gpt", LARGE),
        "t5": (
            "tests/tasks/t5.py",
            {"depth": "4", "width": "384", "heads": "6", "vocab": "500", "length": "30", "size": "200", "batch": "24"},
        ),
        "llama": (
            "tests/tasks/llama.py",
            {"depth": "6", "width": "384", "heads": "6", "vocab": "512", "length": "60", "size": "200", "batch": "12"},
        ),
        "large llama": (
            "tests/tasks/llama.py",
            {"depth": "8", "width": "768", "heads": "6", "vocab": "512", "length": "60", "size": "200", "batch": "4"},
        ),
    }
)
# With --only: plans of over 500 MB; and what ``stretto.planner.risk`` was fitted to, so that it isn't judged by that.
ASKED_FOR = frozenset({"large gpt", "t5", "llama", "large llama"})
WARM = 2


Launched = Callable[[dict[str, Any], int], dict[str, Any]]


def measured(
    plan: str, sets: dict[str, str], more: int = 0, *, path: str, steps: int, launcher: Launched
) -> tuple[float, float]:
    """Median seconds of a step, and the peak in bytes, of a real run; ``more``: steps that aren't timed."""
    with tempfile.TemporaryDirectory() as folder:
        sets = {**sets, "steps": str(WARM + steps + more)}
        order = TrainOrder(task=str(ROOT / path), run=folder, plan=plan, plan_origin="", sets=sets)
        found = launcher(asdict(order), Plan.parse(plan).world_size)
        return statistics.median(found["seconds"][WARM : WARM + steps]), float(found["peak_bytes"])


def on_this_host(launcher: LocalLauncher, payload: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Trains as ``stretto train`` does."""
    job = Job(
        entry="timed:work",
        payload=payload,
        num_workers=world_size,
        prepare="stretto.training:prepare",
        threads=Cluster.measure().threads_per_worker(world_size),
        python_path=(str(Path(__file__).parent),),
        log_dir=Path(payload["run"]),
    )
    result = launcher.run(job, on_output=lambda line: None)
    found = next(iter(result.results.values()), None)
    if found is None:
        raise SystemExit(f"{payload['task']} {payload['plan']}: {result.failure}")
    return found


def case(name: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each plan of a task; with a ``rate``, over two hosts."""
    path, _ = CASES[name]
    with ExitStack() as stack:
        launcher = stack.enter_context(LocalLauncher(preloads_of()))
        if rate:
            hosts = stack.enter_context(two_hosts(rate))
            links = links_between(hosts)
            launch: Launched = lambda payload, size: run_apart(hosts, payload, size)[0]  # noqa: E731
        else:
            links = measure_links(2, launcher)
            launch = partial(on_this_host, launcher)
        real = partial(measured, path=path, steps=options.steps, launcher=launch)
        longest = str(WARM + options.steps + options.long)
        found = figures(partial(predicted, name, links, bool(rate), longest, launcher), real, options)
    rows = []
    for plan, one in found.items():
        told = {key: one.pop(key)[0] for key in ("allocator", "spread")}
        row = {"task": f"{name} over {rate}" if rate else name, "plan": plan, **told}
        row |= {key: statistics.median(values) for key, values in one.items()}
        row["time_error"] = row["predicted"] / row["measured"] - 1
        row["memory_error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        rows.append(row)
        print(
            f"{row['task']:<16} {plan:<36} {1e3 * row['predicted']:8.1f} ms predicted {1e3 * row['measured']:8.1f} "
            f"measured {row['time_error']:+7.1%}   {row['predicted_bytes'] / 1e6:7.0f} MB "
            f"{row['measured_bytes'] / 1e6:7.0f} {row['memory_error']:+7.1%}",
            flush=True,
        )
    return {"rows": rows, "links": links.to_json()}


def predicted(name: str, links: LinkTable, apart: bool, steps: str, launcher: LocalLauncher) -> list[dict[str, Any]]:
    """What is predicted of each plan of a task, in a host's process as ``stretto plan`` does."""
    path, sets = CASES[name]
    payload = {"task": str(ROOT / path), "sets": {**sets, "steps": steps}, "plans": PLANS, "apart": apart}
    job = Job(
        entry="stretto.planning:work",
        payload={**payload, "links": links.to_json()},
        prepare="timed:rehearse",
        python_path=(str(Path(__file__).parent),),
        safe_points=False,
    )
    (found,) = result_of(launcher.run(job), "the plans were not looked at")
    return list(found)


def figures(
    predict: Callable[[], list[dict[str, Any]]],
    real: Callable[..., tuple[float, float]],
    options: argparse.Namespace,
) -> dict[str, dict[str, list[Any]]]:
    """Of each plan, what each round found."""
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    _, sets = CASES[options.case]
    for count in range(1, options.rounds + 1):
        for plan, one in zip(PLANS, predict(), strict=True):
            if "refused" in one:
                print(f"{options.case} {plan}: {one['refused']}")
                continue
            found[plan]["allocator"].append(one["allocator"])
            found[plan]["spread"].append(one["memory_spread"])
            found[plan]["predicted"].append(one["step_seconds"])
            found[plan]["predicted_bytes"].append(float(one["memory_bytes"]))
        for plan in list(found):
            seconds, peak = real(plan, sets, options.long if count == options.rounds else 0)
            found[plan]["measured"].append(seconds)
            found[plan]["measured_bytes"] = [peak]
    return found


def in_own_process(name: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """What :func:`case` returns."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.json")
        counts = ("--steps", str(options.steps), "--rounds", str(options.rounds), "--long", str(options.long))
        words = (*counts, "--case", name, "--out", str(out), "--rate", rate)
        # Also for the workers that are apart, which a user starts with what `stretto doctor` says of their hosts.
        subprocess.run([sys.executable, __file__, *words], check=True, env={**os.environ, **allocator_variables()})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    """Runs all, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=0, help="steps of the last round that are not timed")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--rate", default="", help="of the link over which the last task's workers talk")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.case is not None:
        options.out.write_text(json.dumps(case(options.case, options.rate, options)))
        return
    kinds = [name for name in CASES if options.only == name or (options.only is None and name not in ASKED_FOR)]
    found = {name: in_own_process(name, options.rate if name == kinds[-1] else "", options) for name in kinds}
    rows = [row for one in found.values() for row in one["rows"]]
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name]
        off = statistics.mean(abs(row["time_error"]) for row in mine)
        chosen, best = min(mine, key=lambda row: row["predicted"]), min(mine, key=lambda row: row["measured"])
        loss = chosen["measured"] / best["measured"] - 1
        print(
            f"{name}: step time off by {off:.1%} in the mean; chosen {chosen['plan']}, {loss:.1%} over {best['plan']}"
        )
    print(
        f"{len(rows)} plans: step time off by {statistics.mean(abs(row['time_error']) for row in rows):.1%} in the mean"
    )
    print(f"peak memory off by {statistics.mean(abs(row['memory_error']) for row in rows):.1%} in the mean")
    if options.out is not None:
        kept = {"rows": rows, "links": {name: one["links"] for name, one in found.items()}}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
