"""The proof must be able to fail: every planted fault is caught, and found where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from planted import PLANTED, Planted
from planted_axes import AXES
from stretto.launch import LocalLauncher
from stretto.testing import faults
from stretto.verify import verify

ROOT = Path(__file__).resolve().parents[2]


ALL = (*PLANTED, *AXES)


def case(planted: Planted) -> ParameterSet:
    marks = [pytest.mark.matrix] if planted.matrix else []
    return pytest.param(planted, id=f"{planted.fault}-{planted.plan.replace('=', '')}", marks=marks)


@pytest.mark.parametrize("planted", [case(one) for one in ALL])
def test_a_planted_fault_is_caught_and_located(launcher: LocalLauncher, planted: Planted) -> None:
    report = verify(
        ROOT / planted.task,
        [planted.plan],
        dict(planted.sets),
        launcher=launcher,
        plant=",".join(filter(None, (f"{faults.__name__}:{planted.fault}", planted.under))),
    )
    (plan,) = report.plans
    found = plan.first_divergence
    assert plan.status == "failed" and not report.passed
    assert found is not None, plan.reason
    assert plan.reason == str(found)
    assert (found.step, found.what) == (planted.step, planted.what), found
    assert planted.says in found.likely
    assert planted.name in (None, found.name)
    assert planted.rank in (None, found.rank)
    assert planted.by is None or found.by == pytest.approx(planted.by)


def test_every_fault_there_is_is_planted() -> None:
    assert set(faults.__all__) == {planted.fault for planted in ALL}
    assert len(faults.__all__) >= 26
