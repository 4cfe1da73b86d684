"""What earlier runs on this machine say about the planner's figures: their predictions beside what was measured."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

NEWEST: Final = 8  # runs that count
PRIOR: Final = 0.1  # runs that "no change" weighs: a run's usual error over a constant's, a tenth over a third, squared
SHORT_SECONDS, SMALL_BYTES = 0.02, 1e8  # steps and peaks of so much weigh half: they tell little of larger ones
_FIGURES: Final = ("step_seconds", "work_seconds", "memory_bytes", "measured_step_seconds", "measured_memory_bytes")
_LOGS: Final = tuple(step / 50 for step in range(-50, 51))  # from 1/e to e


@dataclass(frozen=True)
class Corrections:
    """Factors of what is predicted.

    Args:
        work: of the time that a rank works.
        waits: of the time that it communicates or waits.
        memory: of the peak.
        runs: how many earlier runs say so.
    """

    work: float = 1.0
    waits: float = 1.0
    memory: float = 1.0
    runs: int = 0

    def seconds(self, work: float, waits: float) -> float:
        """Of a step."""
        return self.work * work + self.waits * waits

    def told(self) -> str:
        """For people."""
        factors = f"work x{self.work:.2f}, waiting x{self.waits:.2f}, memory x{self.memory:.2f}"
        return f"predictions are corrected by {self.runs} earlier run(s): {factors}"

    def to_json(self) -> dict[str, float]:
        """As a JSON object."""
        return asdict(self)


def machine() -> str:
    """The name of this machine: what another one measured says nothing of it."""
    return platform.node()


def corrections_of(runs: Path) -> Corrections:
    """What the newest runs of this machine in the folder ``runs`` teach; summaries that can't be read teach nothing."""
    return learn([pair for _, pair in sorted(_pairs(runs), key=lambda one: one[0], reverse=True)][:NEWEST])


def learn(forecasts: Sequence[Mapping[str, Any]]) -> Corrections:
    """The factors that bring predictions nearest to what was measured, by the squares of the logarithms' errors.

    Args:
        forecasts: as ``summary.json`` has them. What each was corrected by is taken out first, so that corrections
            don't pile up.
    """
    times, memories = list[tuple[float, float, float]](), list[tuple[float, float]]()
    for one in forecasts:
        before = Corrections(**one["corrected"])
        work, waits = one["work_seconds"] / before.work, (one["step_seconds"] - one["work_seconds"]) / before.waits
        times.append((one["measured_step_seconds"], work, max(0.0, waits)))
        peak = one["measured_memory_bytes"]
        memories.append((peak / (peak + SMALL_BYTES), math.log(peak * before.memory / one["memory_bytes"])))
    if not times:
        return Corrections()

    def error(factors: tuple[float, float]) -> float:
        work, waits = (math.exp(factor) for factor in factors)
        off = sum(
            took / (took + SHORT_SECONDS) * math.log(took / (work * one + waits * other)) ** 2
            for took, one, other in times
        )
        return off + PRIOR * (factors[0] ** 2 + factors[1] ** 2)

    work, waits = min(((work, waits) for work in _LOGS for waits in _LOGS), key=error)
    memory = sum(weight * log for weight, log in memories) / (sum(weight for weight, _ in memories) + PRIOR)
    return Corrections(math.exp(work), math.exp(waits), math.exp(memory), len(times))


def _pairs(runs: Path) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Of each run that tells both: when it ended, and its forecast."""
    for file in runs.glob("*/summary.json"):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["forecast"]
            ended = file.stat().st_mtime
            figures = [*(found[key] for key in _FIGURES), *asdict(Corrections(**found["corrected"])).values()]
            if found["machine"] == machine() and all(0 < figure < math.inf for figure in figures[:-1]):
                yield ended, found
        except (OSError, ValueError, KeyError, TypeError):
            continue
