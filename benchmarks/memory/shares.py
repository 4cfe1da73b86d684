"""What a rank holds of the parameters, over their total divided by the degrees of the axes that cut them.

    OMP_NUM_THREADS=1 python benchmarks/memory/shares.py [--out shares.json]

Each plan is laid out over as many processes as it has ranks, up to eight, and every rank counts the bytes of what it
holds. With ``zero=3`` the weights of a host are one copy in shared memory: what counts is the part that the rank
answers for. Parameters that several ranks hold whole, tied ones of several stages and those that ``tp`` leaves, count
apart: their sum is listed, and their names with the largest first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forked import run_forked
from ours import Ours

from stretto.comm.group import Group
from stretto.plan import Plan
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ROOT / "benchmarks" / "pipeline" / "task.py", {"depth": 8, "width": 256, "heads": 8, "time": 16, "batch": 16}
GPT = ROOT / "examples" / "gpt", {"depth": 8, "width": 256, "heads": 8, "context": 32, "batch": 16}
CASES = (
    *(("blocks", BLOCKS, plan) for plan in ("tp=2", "tp=4", "pp=2", "pp=4", "tp=2,pp=2", "tp=2,pp=4")),
    *(("blocks", BLOCKS, plan) for plan in ("dp=2,zero=3", "dp=2,tp=2,zero=3", "dp=2,tp=2,pp=2,zero=3")),
    *(("gpt", GPT, plan) for plan in ("tp=2", "tp=4", "dp=2,tp=2,zero=3", "dp=4,tp=2,zero=3")),
)


def held(ours: Ours, plan: Plan, group: Group) -> dict[str, Any]:
    """Bytes: of all parameters, of those that ranks share out (at most on a rank), and of those they hold whole."""
    places = ours.on.applied.places
    here = {name: place.local.numel() if plan.zero == 3 else place.compute.numel() for name, place in places.items()}
    counts = group.gather_json(here)
    used = plan.tp * plan.pp * (plan.dp if plan.zero == 3 else 1)
    copies = 1 if plan.zero == 3 else plan.dp
    sizes = {name: place.spec.numel for name, place in places.items()}
    whole = {name: size for name, size in sizes.items() if sum(count[name] for count in counts) > copies * size}
    total = sum(sizes.values())
    split = [sum(count for name, count in rank.items() if name not in whole) for rank in counts]
    return {
        "parameter_bytes": 4 * total,
        "most_bytes": 4 * max(split),
        "share_bytes": 4 * (total - sum(whole.values())) / used,
        "whole_bytes": 4 * sum(whole.values()),
        "whole": sorted(whole, key=lambda name: -whole[name]),
    }


def measured(name: str, path: Path, settings: Mapping[str, Any], text: str) -> dict[str, Any]:
    """One plan, by as many processes as it has ranks."""
    plan = Plan.parse(text)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "found.json"

        def body(group: Group) -> None:
            found = held(Ours(load_task(path, settings), text, group), plan, group)
            if group.rank == 0:
                kept.write_text(json.dumps(found))

        run_forked(plan.world_size, body)
        found = json.loads(kept.read_text())
    return {"model": name, "plan": text, **found, "ratio": found["most_bytes"] / found["share_bytes"]}


def main() -> None:
    """Lays the plans out and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name, (path, settings), text in CASES:
        found = measured(name, path, settings, text)
        lines.append(found)
        share = found["whole_bytes"] / found["parameter_bytes"]
        print(
            f"{name}, {text}: at most {found['most_bytes'] / 1e6:.3f} MB on a rank, {found['ratio']:.3f} of its share; "
            f"held whole: {share:.2%} ({', '.join(found['whole'][:3]) or 'nothing'})",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
