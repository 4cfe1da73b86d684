"""A step of stretto's ``zero=1``, ``2`` and ``3``, with and without microbatches, against the systems of the field.

    OMP_NUM_THREADS=1 python benchmarks/zero/run.py [--blocks 35] [--stage 1] [--pieces 4] [--out results.json]

All arms of a comparison train the same model on the same samples in the same two processes, interleaved in paired
blocks. Each takes a few steps first; their losses must agree, or they don't do the same work. The control is the
first peer twice: outside 0.985 to 1.015 the comparison is measured once more, and then it is void. A peer that isn't
installed is said to be so. ``benchmarks/table.py`` writes the READMEs' table from the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch._dynamo  # noqa: F401  (FSDP2 imports it at its first step otherwise)
from common import Case, gloo_group
from forked import run_forked
from paired import ratio, run_blocks, table
from peers import PEERS, build, version

from stretto.assemble import assemble, build_template
from stretto.comm.group import Group
from stretto.data import Feeder, Position, Sampler
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"depth": 6, "width": 256, "heads": 8, "context": 128, "batch": 16, "steps": 1000}
FIRST_STEPS = 5  # of each arm, before the clock runs
LOSS_TOLERANCE = 1e-4  # relative, after the first steps, in float32
CONTROL = 1.015  # of the same arm twice, at most, and at least one over it
ATTEMPTS = 2  # a comparison whose control fails is measured once more


def stretto_step(case: Case) -> Callable[[], float]:
    """A step of stretto's engine, as a run makes it."""
    task, plan = case.task, Plan.parse(case.plan)
    machinery = assemble(task, plan, build_template(task), case.group)
    feeder = Feeder(case.dataset, task.collate, task.recipe.seed)
    stepper = Stepper(task, plan, feeder, machinery)
    sampler = Sampler(len(case.dataset), task.recipe.batch, task.recipe.seed)  # type: ignore[arg-type]
    batches = sampler.batches(1, Position())
    return lambda: stepper.step(next(batches)).loss


def build_arms(case: Case) -> tuple[dict[str, Callable[[], float]], str]:
    """Every arm that can run here, by name, and the name of the control. Every rank must call it."""
    arms: dict[str, Callable[[], float]] = {}
    control = ""
    for name, package, make in PEERS[case.stage]:
        if version(package) is None:
            continue
        arms[name] = build(make, case)
        if not control:
            control = f"{name}, again"
            arms[control] = build(make, case)
    arms["stretto"] = stretto_step(case)
    return arms, control


def compare(case: Case, blocks: int, steps: int) -> dict[str, Any]:
    """One stage with one number of microbatches: all arms, as plain JSON. Every rank must call it."""
    arms, control = build_arms(case)
    warnings.simplefilter("ignore")  # or a peer pays at each step for being told of a deprecated call
    losses = {name: [step() for _ in range(FIRST_STEPS)][-1] for name, step in arms.items()}
    check_alike(case, losses)
    timed = {name: partial(_drop, step) for name, step in arms.items()}
    void, attempts = True, 0
    while void and attempts < ATTEMPTS:
        times = run_blocks(timed, blocks, steps, case.group.barrier)
        found = ratio(control, PEERS[case.stage][0][0], times)
        void = case.group.maximum(abs(math.log(found.median))) > math.log(CONTROL)  # so all ranks decide alike
        attempts += 1
    rows = []
    for name, package, _ in PEERS[case.stage]:
        row: dict[str, Any] = {"name": name, "package": package}
        if name in arms:
            row |= {"milliseconds": _milliseconds(times[name]), "loss": losses[name]}
            row["ratio"] = ratio("stretto", name, times).to_json()
        rows.append(row)
    if case.group.rank == 0:
        rounded = {name: round(loss, 6) for name, loss in losses.items()}
        print(f"\n{case.plan}: loss after {FIRST_STEPS} steps:", rounded)
        print(table([found, *(ratio("stretto", row["name"], times) for row in rows if "ratio" in row)], times))
        print("not installed:", ", ".join(row["name"] for row in rows if "ratio" not in row) or "none")
        print("control:", "void" if void else "good", f"(attempt {attempts})", flush=True)
    return {
        "plan": case.plan,
        "stage": case.stage,
        "microbatches": case.pieces,
        "milliseconds": _milliseconds(times["stretto"]),
        "loss": losses["stretto"],
        "control": found.to_json(),
        "attempts": attempts,
        "void": void,
        "peers": rows,
    }


def check_alike(case: Case, losses: dict[str, float]) -> None:
    """Raises SystemExit where the arms, which began alike, don't have the same loss."""
    spread = (max(losses.values()) - min(losses.values())) / min(losses.values())
    if not spread <= LOSS_TOLERANCE:
        raise SystemExit(f"{case.plan}: the arms do different work; losses after {FIRST_STEPS} steps: {losses}")


def _drop(step: Callable[[], float]) -> None:
    step()


def _milliseconds(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 2)


def main() -> None:
    """Runs the comparisons and prints their tables; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=35)
    parser.add_argument("--steps", type=int, default=1, help="steps in a block")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], help="only this one")
    parser.add_argument("--pieces", type=int, help="only with so many microbatches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task = load_task(ROOT / "examples" / "gpt", SETTINGS)
        dataset, gloo = task.data()["train"], gloo_group(group)
        found = []
        for pieces in [options.pieces] if options.pieces else [1, 4]:
            for stage in [options.stage] if options.stage else [1, 2, 3]:
                found.append(compare(Case(task, dataset, stage, pieces, group, gloo), options.blocks, options.steps))
                gc.collect()
        if group.rank == 0 and options.out:
            versions = {package: version(package) for package in ("torch", "accelerate", "deepspeed")}
            head = {"precision": "fp32", "workers": group.size, "versions": versions, "settings": SETTINGS}
            options.out.write_text(json.dumps({**head, "comparisons": found}, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
