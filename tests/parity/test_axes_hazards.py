"""What breaks other systems where layers are cut, and where a model lies in stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity import BAR_GRADIENT, BAR_WEIGHT, FIGURES
from stretto.launch import LocalLauncher
from stretto.verify import verify

TASK = Path(__file__).resolve().parents[2] / "tests" / "tasks" / "odd_axes.py"


def same(launcher: LocalLauncher, plan: str, **sets: str) -> None:
    (report,) = verify(TASK, [plan], sets, launcher=launcher).plans
    assert report.status == "passed", report
    assert all((getattr(report, name) or 0) <= BAR_GRADIENT for name in FIGURES[:3]), report
    assert all((getattr(report, name) or 0) <= BAR_WEIGHT for name in FIGURES[3:]), report


@pytest.mark.parametrize("size", [5, 1])
def test_what_skips_a_stage_and_what_is_no_tensor_arrive_whatever_the_batch_pp04_pp08_ci04(
    launcher: LocalLauncher, size: int
) -> None:
    """None, a number and a truth value go in and come out; a batch of five is three and two, of one one and none."""
    same(launcher, "pp=3,microbatches=2", kind="flags", batch=str(size))


def test_seven_rows_on_three_ranks_and_two_on_three_tp03(launcher: LocalLauncher) -> None:
    """Three, two and two; and where there are two, one rank has none."""
    same(launcher, "tp=3", kind="narrow")


def test_five_heads_on_four_ranks_tp05(launcher: LocalLauncher) -> None:
    """Two, one, one and one."""
    same(launcher, "tp=4", kind="heads")
