"""What was predicted is said beside what was measured, once, and kept; where nothing was, nothing is said."""

from __future__ import annotations

from stretto.corrections import machine
from stretto.forecast import SEEN, WARM, Forecast


def test_the_first_steps_are_compared_once_without_the_cold_ones() -> None:
    forecast = Forecast({"step_seconds": 0.11, "memory_bytes": 5e6})
    said = [forecast.see(seconds) for seconds in [9.0] * WARM + [0.1] * SEEN + [7.0]]
    assert said[: WARM + SEEN - 1] == [[]] * (WARM + SEEN - 1) and said[-1] == []
    assert said[WARM + SEEN - 1] == ["a step was predicted to take 110.0 ms and takes 100.0: +10%"]
    assert forecast.summary(4_000_000)["forecast"] == {
        "step_seconds": 0.11,
        "memory_bytes": 5e6,
        "measured_step_seconds": 0.1,
        "measured_memory_bytes": 4_000_000,
        "machine": machine(),
    }


def test_a_short_run_keeps_what_it_saw_and_one_without_a_forecast_nothing() -> None:
    short = Forecast({"step_seconds": 1.0, "memory_bytes": 1.0})
    assert short.see(1.0) == [] and short.summary(1)["forecast"]["measured_step_seconds"] is None
    none = Forecast(None)
    assert not any(none.see(1.0) for _ in range(20)) and none.summary(1) == {}
