"""Collectives over shared memory against Gloo: the same processes, interleaved in paired blocks.

    OMP_NUM_THREADS=1 python benchmarks/shared_memory/run.py [--workers 2] [--blocks 30] [--out results.json]

25 MB of float32, which is what a model of 6 million parameters sends at a step, and 400 bytes, which is what a vote or
a loss sends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from forked import run_forked
from paired import ratio, run_blocks, table

from stretto.comm.group import Group

LARGE, SMALL = 6_553_600, 100  # elements
WORDS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}


def arms(group: Any, workers: int, elements: int) -> dict[str, Callable[[], None]]:
    """Each collective over ``group``, with ``elements`` on the whole side."""
    whole, part = torch.zeros(elements // workers * workers), torch.zeros(elements // workers)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
    }


def main() -> None:
    """Runs the pairs and prints the table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        assert group.transport == "shared memory", group.transport
        gloo = dist.new_group(backend="gloo")
        results: list[dict[str, object]] = []
        for elements, steps in ((LARGE, 1), (SMALL, 20)):
            ours, theirs = (arms(which, group.size, elements) for which in (group.process_group, gloo))
            names = {f"{word}, {4 * elements} bytes": kind for kind, word in WORDS.items()}
            both = {name: ours[kind] for name, kind in names.items()}
            both |= {f"Gloo: {name}": theirs[kind] for name, kind in names.items()}
            times = run_blocks(both, options.blocks, steps, group.barrier)
            ratios = [ratio(name, f"Gloo: {name}", times) for name in names]
            seconds = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
            results += [{**found.to_json(), "seconds": seconds[found.arm]} for found in ratios]
            if group.rank == 0:
                print(table(ratios, times), flush=True)
        if group.rank == 0 and options.out:
            shared = {"workers": group.size, "torch": torch.__version__}
            options.out.write_text(json.dumps({**shared, "ratios": results}, indent=1) + "\n")

    run_forked(options.workers, body)


if __name__ == "__main__":
    main()
