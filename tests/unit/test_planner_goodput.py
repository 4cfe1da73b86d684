"""Failures: the closed forms against runs that are played out, and the best interval against all others."""

from __future__ import annotations

import random

import pytest

from stretto.planner.goodput import Failures, best_interval, goodput, restart_share

HOUR = 3600.0


def played(failures: Failures, interval: float, save: float, segments: int, seed: int) -> float:
    """The share of time of a job that is played: each interval until one comes through."""
    drawn, total = random.Random(seed), 0.0
    for _ in range(segments):
        while (life := drawn.expovariate(failures.rate)) < interval + save:
            total += life + failures.restart_seconds
        total += interval + save
    return segments * interval / total


@pytest.mark.parametrize(("devices", "interval"), [(1000, 0.5 * HOUR), (16000, HOUR), (16000, 0.2 * HOUR)])
def test_the_share_is_that_of_jobs_that_are_played(devices: int, interval: float) -> None:
    failures = Failures(devices, 50_000 * HOUR, restart_seconds=600)
    assert restart_share(failures, interval, 60) == pytest.approx(played(failures, interval, 60, 20_000, 1), rel=0.02)


@pytest.mark.parametrize("devices", [8, 1024, 100_000])
@pytest.mark.parametrize("save", [0.0, 5.0, 300.0])
def test_no_other_interval_is_better(devices: int, save: float) -> None:
    failures = Failures(devices, 50_000 * HOUR)
    best = best_interval(failures, save)
    share = restart_share(failures, best, max(save, 1e-3))
    for factor in (0.2, 0.8, 0.95, 1.05, 1.25, 5.0):
        assert restart_share(failures, best * factor, max(save, 1e-3)) <= share
    assert best == pytest.approx((2 * max(save, 1e-3) / failures.rate) ** 0.5, rel=0.35), "near Young's first estimate"


def test_recovery_loses_less_and_more_devices_lose_more() -> None:
    few, many = (goodput(Failures(devices, 50_000 * HOUR), 30, 10.0, 60.0) for devices in (1024, 16384))
    assert 0.9 < few.restart < few.recovery < 1
    assert many.restart < few.restart and many.recovery < few.recovery
    assert few.failures == pytest.approx(1024 * 30 * 24 / 50_000)
    hopeless = goodput(Failures(10**9, HOUR), 1, 1.0, 60.0)
    assert hopeless.restart == pytest.approx(0, abs=1e-3) and hopeless.recovery < 0.01


def test_what_means_nothing_is_refused() -> None:
    for devices, mtbf in ((0, HOUR), (1, 0.0)):
        with pytest.raises(ValueError, match="at least one device"):
            Failures(devices, mtbf)
