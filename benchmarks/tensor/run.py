"""A step of ``tp=2`` against a script that cuts the same model by hand with DTensor.

    OMP_NUM_THREADS=1 python benchmarks/tensor/run.py [--blocks 30] [--out results.json]

Both arms train the same blocks on the same samples in the same two processes, interleaved in paired blocks; their
losses must agree. The script is what a careful engineer writes: ``parallelize_module`` with column- and row-wise
linears, the fused projection's rows put in the order in which its ranks need them, DTensor over Gloo, plain SGD, and
nothing else: no norm, no vote, no ledger. One worker alone, with the whole model, says what two workers gain.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from forked import run_forked
from ours import Ours
from paired import ratio, run_blocks, table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stretto.assemble import build_template
from stretto.comm.group import Group
from stretto.data import Feeder, Position, Sampler
from stretto.task import Task, load_task

HERE = Path(__file__).resolve().parent
TASK = HERE.parent / "pipeline" / "task.py"
SETTINGS = {"depth": 4, "width": 256, "heads": 8, "time": 64, "batch": 32}
FIRST_STEPS = 3
LOSS_TOLERANCE = 1e-4


def _by_rank(tensor: Tensor, heads: int, size: int) -> Tensor:
    """Rows in the order (three, heads, width of one) as (rank, three, heads of it, width of one)."""
    rows = tensor.view(3, size, heads // size, -1, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape).contiguous()


def by_hand(task: Task, group: Group, gloo: dist.ProcessGroup) -> Callable[[], float]:
    """The script."""
    model = copy.deepcopy(build_template(task).structure)
    mesh = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("tp",))
    for block in model.children():
        linear: Any = block.mixed
        with torch.no_grad():
            linear.weight.copy_(_by_rank(linear.weight, int(block.heads), group.size))  # type: ignore[arg-type]
            linear.bias.copy_(_by_rank(linear.bias, int(block.heads), group.size))  # type: ignore[arg-type]
        ways = {"mixed": ColwiseParallel(), "joined": RowwiseParallel()}
        parallelize_module(block, mesh, {**ways, "wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        block.heads = int(block.heads) // group.size  # type: ignore[arg-type]
    parameters = list(model.parameters())
    cut = [one for one in parameters if isinstance(one, DTensor)]
    whole = [one for one in parameters if not isinstance(one, DTensor)]
    return _stepping(task, model, [torch.optim.SGD(some, lr=1e-3) for some in (cut, whole)])


def alone(task: Task) -> Callable[[], float]:
    """The whole model, by each of the two workers for itself, so with the other core busy."""
    model = copy.deepcopy(build_template(task).structure)
    return _stepping(task, model, [torch.optim.SGD(model.parameters(), lr=1e-3)])


def _stepping(task: Task, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Callable[[], float]:
    dataset = task.data()["train"]
    feeder = Feeder(dataset, task.collate, task.recipe.seed)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())

    def step() -> float:
        batch = next(batches)
        samples = feeder.get(batch.ids, batch.start.epoch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, weight = task.losses(model(samples[0]), samples)["loss"]
        loss = total / float(weight)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.detach())

    return step


def _drop(step: Callable[[], float]) -> None:
    step()


def main() -> None:
    """Runs the arms and prints the table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task, gloo = load_task(TASK, SETTINGS), dist.new_group(backend="gloo")
        arms: dict[str, Callable[[], float]] = {
            "DTensor": by_hand(task, group, gloo),
            "tp=2": Ours(task, "tp=2", group),
            "one worker": alone(task),
            "DTensor, again": by_hand(task, group, gloo),
        }
        losses = {name: [step() for _ in range(FIRST_STEPS)][-1] for name, step in arms.items()}
        if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * min(losses.values()):
            raise SystemExit(f"the arms do different work; losses after {FIRST_STEPS} steps: {losses}")
        timed = {name: partial(_drop, step) for name, step in arms.items()}
        times = run_blocks(timed, options.blocks, 2, group.barrier)
        pairs = (("DTensor, again", "DTensor"), ("tp=2", "DTensor"), ("tp=2", "one worker"))
        ratios = [ratio(*pair, times) for pair in pairs]
        if group.rank == 0:
            print(table(ratios, times), flush=True)
            if options.out:
                head = {"workers": 2, "torch": torch.__version__, "settings": SETTINGS, "losses": losses}
                found = {**head, "ratios": [one.to_json() for one in ratios]}
                options.out.write_text(json.dumps(found, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
