"""Paired blocks: every arm in turn, in the same processes, so that a machine whose speed drifts bends all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Ratio:
    """An arm's block time over its baseline's, pair by pair.

    Args:
        arm: the name of the arm.
        baseline: the name of what it is divided by.
        blocks: pairs.
        median: of the ratios.
        lower: of a bootstrap over the pairs, 2.5 %.
        upper: likewise, 97.5 %.
    """

    arm: str
    baseline: str
    blocks: int
    median: float
    lower: float
    upper: float

    def to_json(self) -> dict[str, object]:
        """Plain JSON."""
        return asdict(self)


def run_blocks(
    arms: Mapping[str, Callable[[], None]],
    blocks: int,
    steps_per_block: int,
    barrier: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a step of each arm in each block; the order of the arms is reversed from block to block.

    Every process must call it with the same arguments; ``barrier`` stands before and after each block. Processor
    time for a ``clock`` leaves out what else the machine does, and fits a lone worker.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for step in list(arms.values()) * 2:  # warm caches, lazy initialisation and the allocator
        step()
    for block in range(blocks):
        order = list(arms) if block % 2 == 0 else list(reversed(arms))
        for name in order:
            barrier()
            began = clock()
            for _ in range(steps_per_block):
                arms[name]()
            barrier()
            times[name].append((clock() - began) / steps_per_block)
    return times


def ratio(arm: str, baseline: str, times: Mapping[str, Sequence[float]], resamples: int = 2000) -> Ratio:
    """The median ratio of ``arm`` to ``baseline`` with a bootstrap interval over the pairs of blocks."""
    ratios = [a / b for a, b in zip(times[arm], times[baseline], strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return Ratio(
        arm,
        baseline,
        len(ratios),
        statistics.median(ratios),
        medians[int(0.025 * resamples)],
        medians[int(0.975 * resamples)],
    )


def table(ratios: Sequence[Ratio], times: Mapping[str, Sequence[float]]) -> str:
    """The ratios as a Markdown table."""
    lines = ["| arm | against | median ratio | 95 % interval | ms a step | blocks |", "|---|---|---|---|---|---|"]
    for found in ratios:
        milliseconds = 1000 * statistics.median(times[found.arm])
        lines.append(
            f"| {found.arm} | {found.baseline} | {found.median:.3f} | {found.lower:.3f} to {found.upper:.3f} "
            f"| {milliseconds:.1f} | {found.blocks} |"
        )
    return "\n".join(lines)
