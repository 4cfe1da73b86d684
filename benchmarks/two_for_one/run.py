"""What sharding costs: a zero=3 step on two workers over one worker's step, with the same batch a worker.

    OMP_NUM_THREADS=1 python benchmarks/two_for_one/run.py [--blocks 40] [--out results.json]

The lone worker has the machine to itself; "both alone" shows what two workers cost each other in memory and caches even
though they never speak. Over shared memory, as stretto talks on one host, and over Gloo.
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
import torch._dynamo  # FSDP2 imports it at its first step otherwise
import torch.distributed as dist
from forked import run_forked
from paired import ratio, run_blocks, table
from step_time.run import ROOT, SETTINGS, stretto_step

from stretto.comm.group import Group
from stretto.comm.members import Broken, Members
from stretto.plan import Plan
from stretto.task import load_task


class Over(Group):
    """A Group's calls over another process group of the same processes."""

    def __init__(self, whole: Group, process_group: Any) -> None:
        ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        Members.__init__(self, *ranks, whole.device, process_group, Broken())
        self.transport, self._made, self._sockets, self._shared = "", [process_group], {}, []


def arms(group: Group) -> dict[str, Callable[[], None]]:
    """The steps to compare, by name."""
    wide = load_task(ROOT / "examples" / "gpt", SETTINGS)
    narrow = load_task(ROOT / "examples" / "gpt", SETTINGS | {"batch": SETTINGS["batch"] // 2})
    gloo = dist.new_group(backend="gloo")
    single = [dist.new_group([rank]) for rank in range(2)][group.rank]
    alone = stretto_step(narrow, Plan.parse("dp=1"), Over(group, single))
    sharded = Plan.parse("dp=2,zero=3")
    return {
        "alone": lambda: alone() if group.rank == 0 else None,
        "both alone": alone,
        "zero=3": stretto_step(wide, sharded, group),
        "zero=3 over Gloo": stretto_step(wide, sharded, Over(group, gloo)),
    }


def main() -> None:
    """Runs the arms and prints the table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        assert group.transport == "shared memory", group.transport
        steps = arms(group)
        times = run_blocks(steps, options.blocks, 1, group.barrier)
        ratios = [ratio(arm, "alone", times) for arm in list(steps)[1:]]
        ratios += [ratio(arm, "both alone", times) for arm in list(steps)[2:]]
        if group.rank == 0:
            print(table(ratios, times), flush=True)
            if options.out:
                shared = {"workers": 2, "torch": torch.__version__, "settings": SETTINGS}
                found = [one.to_json() for one in ratios]
                options.out.write_text(json.dumps({**shared, "ratios": found}, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
