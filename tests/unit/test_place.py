"""What a second look saw, in words: the earliest operation, what was made before what arrived, and how far down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stretto.plan import Plan
from stretto.verify.facts import RankFacts, ReferenceRecord, Sighting, StepFacts, TensorFact
from stretto.verify.place import bound_for, down_to, located
from stretto.verify.report import Divergence

LOSS = Divergence(1, "loss", "loss", None, 0.5, "forward is another")
GRADIENT = Divergence(1, "gradient", "a", 0, 0.5, "a share is missing")
PLAN = Plan.parse("pp=2")
MADE = Sighting(place=7, kind="made", name="blocks.1", operation="linear", microbatch=1, by=0.25)
RECORD = ReferenceRecord(dtype="float64", batch=4, batch_norms=(), random=False, aliases={}, scales={}, steps=())


def test_the_earliest_operation_of_any_rank_is_named_with_its_place() -> None:
    found = located(LOSS, {0: replace(MADE, place=9, name="later"), 1: MADE}, PLAN)
    assert (found.name, found.rank, found.what, found.by) == ("blocks.1", 1, "loss", 0.5)
    assert "what blocks.1 gives (linear, microbatch 2, off by 0.25), on rank 1 (pp=1)" in found.likely


def test_what_is_wrong_where_it_is_made_is_not_the_message_s_fault() -> None:
    arrived = replace(MADE, kind="arrived", microbatch=0)
    assert located(LOSS, {0: MADE, 1: arrived}, PLAN).rank == 0
    alone = located(LOSS, {0: None, 1: arrived}, PLAN)
    assert alone.rank == 1 and "is right where it is made, and not where it has come to, on rank 1" in alone.likely


def test_ranks_that_see_the_same_are_all_named_and_many_are_counted() -> None:
    plan = Plan.parse("tp=6")
    found = located(LOSS, {rank: replace(MADE, kind="parameter", operation="") for rank in range(6)}, plan)
    assert "computes with other values of blocks.1, off by 0.25, on rank 0 (tp=0), rank 1" in found.likely
    assert found.likely.endswith("and 2 more") and "rank 4" not in found.likely


def test_what_belongs_to_no_module_and_what_is_nowhere_is_said_so() -> None:
    own = located(LOSS, {0: replace(MADE, name=""), 1: None}, PLAN)
    assert own.name == "loss" and "what the model itself gives" in own.likely
    assert "every operation gives" in located(LOSS, {0: None, 1: None}, PLAN).likely
    lost = located(LOSS, {0: MADE}, PLAN)
    assert lost.name == "loss" and "did not come as far" in lost.likely


@pytest.mark.parametrize(("by", "bound"), [(0.1, 1e-6), (1e-7, 1e-9), (2e-12, 1e-11), (math.inf, 1e-6)])
def test_a_small_difference_is_looked_for_with_a_narrow_bound(by: float, bound: float) -> None:
    assert bound_for(replace(LOSS, by=by), RECORD) == pytest.approx(bound)


def gradients(*differs: bool | None) -> tuple[TensorFact, ...]:
    """Of a, b, c...: off, right, or (None) not on this rank."""
    return tuple(
        TensorFact(
            kind="gradient",
            name="abc"[place],
            rel=float(off or False),
            share=0.0 if off is None else 1.0,
            box="",
            whole=True,
            differs=bool(off),
        )
        for place, off in enumerate(differs)
    )


def said(*ranks: tuple[TensorFact, ...]) -> str:
    steps = [(StepFacts(step=0), StepFacts(step=1, tensors=tensors)) for tensors in ranks]
    return down_to(GRADIENT, [RankFacts(rank=r, share=0, steps=step) for r, step in enumerate(steps)]).likely


def test_how_far_down_backward_is_right() -> None:
    assert "right down to c, and off from b on" in said(gradients(True, True, None), gradients(None, None, False))
    assert "right down to b, and off from a on" in said(gradients(True, False, False))


def test_nothing_is_said_where_right_and_wrong_are_mixed_or_all_is_wrong() -> None:
    for ranks in ([gradients(False, True, False)], [gradients(True, True, True)], [gradients(False, False, True)]):
        assert said(*ranks) == GRADIENT.likely
    assert said((), gradients(True, True, False)) != GRADIENT.likely, "a rank that kept no tensors tells nothing"
