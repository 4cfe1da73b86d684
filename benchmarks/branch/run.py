"""What towers on two workers save: a step of ``branch=2`` over one worker's step, on the same global batch.

    OMP_NUM_THREADS=1 python benchmarks/branch/run.py [--blocks 40] [--out results.json]

Two equal towers, so half the time is the best there is. The lone worker has the machine to itself. The control comes
first: the lone worker's step twice. Outside 0.985 to 1.015 the run is void.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from forked import run_forked
from paired import ratio, run_blocks, table
from step_time.run import stretto_step
from torch.utils.data import DataLoader
from two_for_one.run import Over

from stretto.comm.group import Group
from stretto.plan import Plan
from stretto.task import Params, Task, load_task


def by_hand(task: Task) -> Callable[[], None]:
    """A step of torch alone on one worker."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(Params(model.named_parameters()))
    loader = DataLoader(task.data()["train"], batch_size=task.recipe.batch, shuffle=True)
    batches = iter(batch for _ in iter(int, 1) for batch in loader)  # epoch after epoch

    def step() -> None:
        batch = next(batches)
        total, weight = task.losses(model(batch[0]), batch)["loss"]
        (total / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        float(total.detach())

    return step


def main() -> None:
    """Runs the arms and prints the table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task = load_task(Path(__file__).with_name("task.py"), {})
        single = [dist.new_group([rank]) for rank in range(2)][group.rank]
        alone, torchs = stretto_step(task, Plan(), Over(group, single)), by_hand(task)
        steps: dict[str, Callable[[], None]] = {
            "one worker": lambda: alone() if group.rank == 0 else None,
            "one worker again": lambda: alone() if group.rank == 0 else None,
            "torch alone, one worker": lambda: torchs() if group.rank == 0 else None,
            "branch=2": stretto_step(task, Plan.parse("branch=2"), group),
        }
        times = run_blocks(steps, options.blocks, 1, group.barrier)
        pairs = [("one worker again", "one worker"), ("branch=2", "one worker")]
        pairs += [(name, "torch alone, one worker") for name in ("one worker", "branch=2")]
        ratios = [ratio(arm, baseline, times) for arm, baseline in pairs]
        if group.rank:
            return
        print(table(ratios, times))
        print("control:", "void" if not 0.985 <= ratios[0].median <= 1.015 else "good", flush=True)
        if options.out:
            shared = {"workers": 2, "torch": torch.__version__, "ratios": [one.to_json() for one in ratios]}
            options.out.write_text(json.dumps(shared, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
