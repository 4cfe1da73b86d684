"""What was predicted of a run, beside what it then took; :mod:`stretto.corrections` learns from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

from stretto.corrections import machine

WARM: Final = 2  # steps that nobody predicts: memory and caches are cold
SEEN: Final = 5


class Forecast:
    """Compares the first steps of a run.

    Args:
        predicted: ``step_seconds``, ``memory_bytes`` and more; None: nothing was predicted.
    """

    def __init__(self, predicted: Mapping[str, Any] | None) -> None:
        self._predicted = predicted
        self._seconds: list[float] = []

    @property
    def measured(self) -> float | None:
        """Seconds of a step, the median of those that were looked at; None as long as it isn't known."""
        found = self._seconds[WARM:]
        return statistics.median(found) if found else None

    def see(self, seconds: float) -> list[str]:
        """Takes a step's time; after the last of those that are looked at, a sentence."""
        if self._predicted is None or len(self._seconds) >= WARM + SEEN:
            return []
        self._seconds.append(seconds)
        if len(self._seconds) < WARM + SEEN or self.measured is None:
            return []
        said, takes = self._predicted["step_seconds"], self.measured
        off = f"{said / takes - 1:+.0%}"
        return [f"a step was predicted to take {1e3 * said:.1f} ms and takes {1e3 * takes:.1f}: {off}"]

    def summary(self, peak_bytes: int) -> dict[str, Any]:
        """For ``summary.json``; nothing where nothing was predicted."""
        if self._predicted is None:
            return {}
        measured = {"measured_step_seconds": self.measured, "measured_memory_bytes": peak_bytes}
        return {"forecast": {**self._predicted, **measured, "machine": machine()}}
