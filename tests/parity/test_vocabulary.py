"""``tp`` cuts tables and heads by vocabulary: losses as people write them have one device's numbers, with no message of
the logits' size; and where the loss can't be traced the head stays whole, and is said to."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity import FIGURES
from stretto.launch import LocalLauncher
from stretto.verify import verify

TASK = Path(__file__).resolve().parents[2] / "tests" / "tasks" / "word_losses.py"
CI = ("gather", "logsumexp", "weighted", "averaged", "terms", "largest")
MORE = ("along", "indexed", "nll", "smooth", "mean", "entropy", "plain")  # by `make matrix`
PLANS = ("tp=2", "tp=3,microbatches=2")  # 13 words on two ranks are 7 and 6, on three 5, 4 and 4
WHOLE = {
    "masked": "the loss can't be traced: the shape of what index gives depends on the numbers",
    "reversed": "a trace of the model and its loss computes something else: the gradient of table.weight differs",
    "named": "batch['name'][0] is a str, which a trace of the loss would take for a constant",
}


def proved(launcher: LocalLauncher, kind: str, plans: tuple[str, ...], sets: dict[str, str]) -> list[str]:
    """The notes of the plans, each of which has one device's numbers."""
    report = verify(TASK, plans, {"kind": kind, **sets}, launcher=launcher)
    for plan in report.plans:
        assert plan.status == "passed", f"{kind} {plan.plan}: {plan.reason}"
        assert all(getattr(plan, name) <= 1e-13 for name in FIGURES), plan
    return [str(plan.reason or "") for plan in report.plans]


@pytest.mark.parametrize("kind", [*CI, *(pytest.param(kind, marks=pytest.mark.matrix) for kind in MORE)])
def test_a_loss_of_logits_in_parts_has_the_numbers_of_one_device(launcher: LocalLauncher, kind: str) -> None:
    notes = proved(launcher, kind, PLANS, {})
    assert not any("whole" in note for note in notes), "cut, not left whole"


def test_a_tied_table_on_two_stages_is_cut_by_rows(launcher: LocalLauncher) -> None:
    plans = ("tp=2,pp=2,microbatches=2", "dp=2,tp=2,zero=3", "dp=2,tp=2,zero=2", "dp=2,tp=2,zero=1")
    assert not any(proved(launcher, "averaged", plans, {"tied": "true", "step": "sgd", "padding": "-1"}))


@pytest.mark.parametrize("kind", WHOLE)
def test_where_the_loss_can_t_be_traced_the_head_is_whole_and_is_said_to_be(launcher: LocalLauncher, kind: str) -> None:
    (note,) = proved(launcher, kind, ("tp=2",), {})
    assert note.startswith("tp leaves what gives the model's output whole on each rank: ") and WHOLE[kind] in note
