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
    whole = {n: place.spec.numel for n, place in places.items() if sum(c[n] for c in counts) > copies * place.spec.numel}
    total = sum(place.spec.numel for place in places.values())
    split = [sum(count for name, count in rank.items() if name not in whole) for rank in counts]
    return {
        "parameter_bytes": 4 * total,
        "most_bytes": 4 * max(split),
        "share_bytes": 4 * (total - sum(whole.values())) / used,
        "whole_bytes": 4 * sum(whole.values()),
        "whole": sorted(whole, key=lambda name: -whole[name]),
    }


def main() -> None:
    """Lays the plans out and prints a table; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name, (path, settings), text in CASES:
        plan, kept = Plan.parse(text), Path(f"{options.out or ROOT / 'shares'}.part")

        def body(group: Group) -> None:
            found = held(Ours(load_task(path, settings), text, group), plan, group)
            if group.rank == 0:
                kept.write_text(json.dumps(found))

        run_forked(plan.world_size, body)
        found = json.loads(kept.read_text())
        kept.unlink()
        lines.append({"model": name, "plan": text, **found, "ratio": found["most_bytes"] / found["share_bytes"]})
        share = found["whole_bytes"] / found["parameter_bytes"]
        print(
            f"{name}, {text}: at most {found['most_bytes'] / 1e6:.3f} MB on a rank, {lines[-1]['ratio']:.3f} of its "
            f"share; held whole: {share:.2%} ({', '.join(found['whole'][:3])}...)",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
