"""What computing activations again costs and saves: a step of one worker, and the most bytes that are alive in it.

    OMP_NUM_THREADS=1 python benchmarks/recompute/run.py [--blocks 24] [--out results.json]

Torch alone is a hand-written loop with ``torch.utils.checkpoint`` around each block. Times are of the processor, in
paired blocks; bytes are of one more step, in which every tensor is followed from its making to its end (weights and the
optimizer's state are there before, and not counted). The control comes first: outside 0.985 to 1.015 the run is void.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from forked import run_forked
from hand_written import loop, samples
from paired import ratio, run_blocks, table
from step_time.run import ROOT, SETTINGS, stretto_step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from stretto.comm.group import Group
from stretto.plan import Plan
from stretto.task import Task, load_task
from stretto.testing.live import LiveBytes

HOW = ("none", "selective", "full")


def by_hand(task: Task, how: str, group: Group) -> Callable[[], None]:
    """A step of torch alone; its generators are restored by torch."""
    torch.manual_seed(0)
    model = task.model()
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    kept += [aten._scaled_dot_product_flash_attention_for_cpu.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)  # type: ignore[no-untyped-call]
    more: dict[str, Any] = {"context_fn": contexts} if how == "selective" else {}
    for block in [] if how == "none" else list(next(m for m in model.modules() if isinstance(m, nn.ModuleList))):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
    return loop(task, model, samples(task.data()["train"], task.recipe.batch, group), group, 1.0)


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes of new tensors that are alive at once in one step."""
    with LiveBytes() as live:
        step()
    return live.peak


def main() -> None:
    """Runs the arms and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        settings = SETTINGS | {"batch": SETTINGS["batch"] // 2}
        task = load_task(ROOT / "examples" / "gpt", settings)
        arms = {f"recompute={how}": stretto_step(task, Plan.parse(f"recompute={how}"), group) for how in HOW}
        arms["recompute=none again"] = stretto_step(task, Plan(), group)
        arms |= {f"torch alone, {how}": by_hand(task, how, group) for how in HOW}
        times = run_blocks(arms, options.blocks, 1, group.barrier, time.process_time)
        pairs = [("recompute=none again", "recompute=none")]
        pairs += [(f"recompute={how}", "recompute=none") for how in HOW[1:]]
        pairs += [(f"torch alone, {how}", "torch alone, none") for how in HOW[1:]]
        pairs += [(f"recompute={how}", f"torch alone, {how}") for how in HOW]
        ratios = [ratio(arm, baseline, times) for arm, baseline in pairs]
        peaks = {name: peak_bytes(step) for name, step in arms.items()}
        print(table(ratios, times))
        print("control:", "void" if not 0.985 <= ratios[0].median <= 1.015 else "good")
        for name, peak in peaks.items():
            print(f"{name}: at most {peak / 1e6:.1f} MB alive in a step", flush=True)
        if options.out:
            found = {"workers": 1, "torch": torch.__version__, "settings": settings, "peak_bytes": peaks}
            options.out.write_text(json.dumps({**found, "ratios": [one.to_json() for one in ratios]}, indent=1) + "\n")

    run_forked(1, body)


if __name__ == "__main__":
    main()
