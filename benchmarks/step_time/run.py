"""Step time of stretto against hand-written DDP and FSDP2: two workers, one machine, interleaved in paired blocks.

    OMP_NUM_THREADS=1 python benchmarks/step_time/run.py [--blocks 100] [--out results.json]

The control comes first: the same hand-written arm twice. Outside 0.985 to 1.015 the run is void.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # FSDP2 imports it at its first step otherwise
from forked import run_forked
from hand_written import ddp, fsdp2
from paired import ratio, run_blocks, table

from stretto.assemble import assemble, build_template
from stretto.comm.group import Group
from stretto.data import Feeder, Position, Sampler
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task, load_task

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"depth": 6, "width": 256, "heads": 8, "context": 128, "batch": 16, "steps": 1_000_000}


def stretto_step(task: Task, plan: Plan, group: Group) -> Callable[[], None]:
    """A step of stretto's engine, as a run makes it."""
    dataset = task.data()["train"]
    machinery = assemble(task, plan, build_template(task), group)
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), machinery)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())  # type: ignore[arg-type]
    return lambda: (stepper.step(next(batches)), None)[1]


def main() -> None:
    """Runs both comparisons and prints the table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1, help="steps in a block; one is about 600 ms here")
    parser.add_argument("--against", choices=["DDP", "FSDP2"], help="only one of the two comparisons")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task = load_task(ROOT / "examples" / "gpt", SETTINGS)
        dataset = task.data()["train"]
        shared = {"precision": "fp32", "workers": group.size, "torch": torch.__version__, "settings": SETTINGS}
        results: list[dict[str, object]] = []
        for name, hand, plan in (("DDP", ddp, "dp=2"), ("FSDP2", fsdp2, "dp=2,zero=3")):
            if options.against not in (None, name):
                continue
            arms = {
                name: hand(task, dataset, group),
                f"{name} again": hand(task, dataset, group),
                f"stretto {plan}": stretto_step(task, Plan.parse(plan), group),
            }
            times = run_blocks(arms, options.blocks, options.steps, group.barrier)
            ratios = [ratio(arm, name, times) for arm in list(arms)[1:]]
            results += [found.to_json() for found in ratios]
            if group.rank == 0:
                print(table(ratios, times))
                print("control:", "void" if not 0.985 <= ratios[0].median <= 1.015 else "good", flush=True)
        if group.rank == 0 and options.out:
            options.out.write_text(json.dumps({**shared, "ratios": results}, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
