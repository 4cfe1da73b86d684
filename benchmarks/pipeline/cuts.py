"""How near the cut that stretto finds for ``pp=2`` comes to the best one, on a model whose ends are unlike its middle.

    OMP_NUM_THREADS=1 python benchmarks/pipeline/cuts.py [--cuts 13] [--rounds 4] [--out cuts.json]

For the cut that was found and others around it, over the middle half of the operations, both stages are timed at
once, so with the other core busy, forward and backward of one microbatch. What counts is the longer stage: the
pipeline's pace.
The cuts take turns, a few rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forked import run_forked
from ours import Ours
from run import stage_seconds

from stretto.assemble import build_template, example_of
from stretto.comm.group import Group
from stretto.graph.assignment import Assignment
from stretto.graph.stages import work_of
from stretto.graph.trace import trace
from stretto.plan import Plan
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"depth": 4, "width": 192, "heads": 6, "context": 128, "batch": 16}
PLAN = "pp=2,microbatches=4"


def pace(times: list[list[float]]) -> float:
    """The longer stage's seconds, each stage's being the median of its turns."""
    return max(statistics.median(stage) for stage in zip(*times, strict=True))


def found_over_best(turns: dict[str, list[list[float]]]) -> float:
    """The found cut's pace over that of the best other.

    The least of many noisy figures is below the least of the true ones, so half of the turns choose the best cut and
    the other half compare it; then the halves change places.
    """
    ratios = []
    for chooses in (0, 1):
        others = [name for name in turns if name != "found"]
        best = min(others, key=lambda name: pace(turns[name][chooses::2]))
        ratios.append(pace(turns["found"][1 - chooses :: 2]) / pace(turns[best][1 - chooses :: 2]))
    return statistics.mean(ratios)


def main() -> None:
    """Measures the cuts and prints them; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task, plan = load_task(ROOT / "examples" / "gpt", SETTINGS), Plan.parse(PLAN)
        template = build_template(task)
        traced = trace(template.structure.train(), *example_of(task, plan, template, None).call)
        work = work_of(traced, template.trainable)
        edges, count = work.edges, len(work.nodes)
        middle = edges[len(edges) // 4 : 3 * len(edges) // 4]
        others = middle[:: max(1, len(middle) // options.cuts)]
        found = Ours(task, PLAN, group)
        cuts = {str(place): Assignment.stretches(count, (place,), 2) for place in others}
        arms = {"found": found} | {name: Ours(task, PLAN, group, cut) for name, cut in cuts.items()}
        turns: dict[str, list[list[float]]] = {name: [] for name in arms}
        shuffled, order = random.Random(0), list(arms)
        for _ in range(4 * options.rounds):
            shuffled.shuffle(order)  # what ran before an arm leaves it a colder or a warmer cache
            for name in order:
                turns[name].append([sum(both) for both in stage_seconds(arms[name], group)])
        if group.rank == 0:
            ratio = found_over_best(turns)
            for name, times in turns.items():
                print(f"cut {name:>6}: the longer stage takes {1000 * pace(times):.2f} ms")
            print(f"found over the best of the others: {ratio:.3f}", flush=True)
            if options.out:
                head = {"workers": 2, "settings": SETTINGS, "plan": PLAN, "operations": len(edges) + 1}
                paces = {name: pace(times) for name, times in turns.items()}
                options.out.write_text(json.dumps({**head, "seconds": paces, "ratio": ratio}, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
