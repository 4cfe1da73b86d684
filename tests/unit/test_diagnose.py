"""From facts to the first divergence: the order of looking, and what each pattern of facts is taken for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from stretto.verify.diagnose import first_divergence
from stretto.verify.facts import Kind, RankFacts, ReferenceRecord, ReferenceStep, StepFacts, TensorFact
from stretto.verify.report import Divergence

PIECES = ((10, 11, 12), (13, 14))  # a batch of five on two ranks
FULL = ReferenceStep(step=1, loss=2.0, norm=3.0, weight=5.0, pieces=PIECES, scales={"gradient": 1.0})
SHORT = ReferenceStep(step=2, loss=2.0, norm=3.0, weight=1.0, pieces=((15,), ()), scales={"gradient": 1.0})
RECORD = ReferenceRecord(
    dtype="float64",
    batch=5,
    batch_norms=("norm",),
    random=False,
    aliases={"embedding": ("head",)},
    scales={},
    steps=(FULL, SHORT),
)
GOOD = (StepFacts(step=1, ids=PIECES[0], weight=5.0), StepFacts(step=1, ids=PIECES[1], weight=5.0))
GOOD_SHORT = (StepFacts(step=2, ids=(15,), weight=1.0), StepFacts(step=2, ghosts=(15,), weight=1.0))


def fact(
    name: str = "layer", kind: Kind = "gradient", rel: float = 0.5, ratio: float | None = None, digest: str = "same"
) -> TensorFact:
    """A whole tensor that differs by ``rel``; with a ratio it differs by that alone."""
    return TensorFact(
        kind=kind,
        name=name,
        rel=rel,
        share=1.0,
        box="[0:4]",
        whole=True,
        differs=rel > 0,
        ratio=ratio,
        residual=0.3 if ratio is None else 1e-16,
        digest=digest,
    )


def shard(rank: int, name: str = "layer", kind: Kind = "gradient", rel: float = 0.5) -> TensorFact:
    return replace(fact(name, kind, rel), box=f"[{2 * rank}:{2 * rank + 2}]", whole=False)


def found(*steps: tuple[StepFacts, StepFacts], record: ReferenceRecord = RECORD) -> Divergence:
    divergence = look(*steps, record=record)
    assert divergence is not None
    return divergence


def look(*steps: tuple[StepFacts, StepFacts], record: ReferenceRecord = RECORD) -> Divergence | None:
    ranks = [RankFacts(rank=rank, share=rank, steps=tuple(step[rank] for step in steps)) for rank in (1, 0)]
    return first_divergence(record, ranks)


def with_tensors(first: list[TensorFact], second: list[TensorFact]) -> tuple[StepFacts, StepFacts]:
    return replace(GOOD[0], tensors=tuple(first)), replace(GOOD[1], tensors=tuple(second))


def test_equal_numbers_have_no_divergence() -> None:
    assert look((StepFacts(step=0), StepFacts(step=0)), GOOD, GOOD_SHORT) is None


def test_what_is_within_the_bounds_is_none() -> None:
    near = replace(GOOD[0], loss=1e-13, norm=1e-13, tensors=(replace(fact(rel=1e-13), differs=False),))
    assert look((near, GOOD[1])) is None


def test_facts_survive_json() -> None:
    ranks = RankFacts(rank=1, share=1, steps=(replace(GOOD[0], tensors=(fact(ratio=2.0),)),), left_out={"layer": 3})
    assert RankFacts.from_json(json.loads(json.dumps(ranks.to_json()))) == ranks
    assert ReferenceRecord.from_json(json.loads(json.dumps(RECORD.to_json()))) == RECORD


def test_the_earliest_step_and_within_it_the_earliest_kind_comes_first() -> None:
    everything = tuple(
        replace(facts, loss=0.1, norm=0.2, tensors=(fact(), fact(kind="weight"), fact(kind="state"))) for facts in GOOD
    )
    assert found((everything[0], everything[1])).what == "loss"
    quiet = tuple(replace(facts, loss=0.0) for facts in everything)
    assert found((quiet[0], quiet[1])).what == "gradient"
    later = tuple(replace(facts, loss=0.3) for facts in GOOD_SHORT)
    assert found((quiet[0], quiet[1]), (later[0], later[1])).step == 1


def test_initial_weights_on_one_rank_and_on_all() -> None:
    off = StepFacts(step=0, tensors=(fact(kind="weight", rel=0.1),))
    one = found((StepFacts(step=0), off))
    assert (one.step, one.what, one.name, one.rank) == (0, "initial weights", "layer", 1)
    assert "rank(s) 1 began with other weights" in one.likely
    assert "is model() the same each time" in found((off, off)).likely


def test_samples_on_two_ranks_and_nowhere() -> None:
    divergence = found((GOOD[0], replace(GOOD[1], ids=(13, 10))))
    assert (divergence.what, divergence.name, divergence.rank, divergence.by) == ("ids", "sample 10", 1, 1.0)
    assert "10 are counted more than once, on rank(s) 0, 1" in divergence.likely
    assert "14 are counted nowhere" in divergence.likely


def test_samples_in_another_order() -> None:
    divergence = found((replace(GOOD[0], ids=(11, 10, 12)), GOOD[1]))
    assert divergence.what == "ids" and divergence.rank == 0
    assert "in another order" in divergence.likely


def test_many_samples_are_not_all_listed() -> None:
    assert (
        "and 1 more"
        in found((replace(GOOD[0], ids=(1, 2, 3, 4, 5, 6)), replace(GOOD[1], ids=(1, 2, 3, 4, 5, 6)))).likely
    )


def test_a_ghost_that_counts() -> None:
    wrong = tuple(replace(facts, loss=0.1, weight=2.0) for facts in GOOD_SHORT)
    divergence = found(GOOD, (wrong[0], wrong[1]))
    assert (divergence.step, divergence.name, divergence.rank) == (2, "sample 15", 1)
    assert "counted all the same" in divergence.likely


def test_a_short_batch_divided_by_the_nominal_count() -> None:
    wrong = tuple(replace(facts, loss=0.8, loss_ratio=0.2) for facts in GOOD_SHORT)
    assert "nominal count (5 samples), not by what it holds (1)" in found(GOOD, (wrong[0], wrong[1])).likely


def test_the_same_ratio_in_a_full_batch_is_no_short_batch() -> None:
    wrong = tuple(replace(facts, loss=0.8, loss_ratio=0.2) for facts in GOOD)
    assert "nominal" not in found((wrong[0], wrong[1])).likely


def test_loss_weights_that_do_not_add_up() -> None:
    wrong = tuple(replace(facts, loss=0.1, weight=4.0) for facts in GOOD)
    assert "add up to 4, on one device to 5" in found((wrong[0], wrong[1])).likely


def test_batch_norm_of_each_ranks_share() -> None:
    buffer = fact("norm.running_mean", kind="buffer", rel=0.2)
    wrong = tuple(replace(facts, loss=0.1, tensors=(buffer,)) for facts in GOOD)
    divergence = found((wrong[0], wrong[1]))
    assert divergence.name == "norm"
    assert "statistics of each rank's share" in divergence.likely


def test_one_ratio_of_all_gradients_is_a_divisor() -> None:
    both = [fact("a", ratio=0.5), fact("b", ratio=0.5)]
    assert "every gradient is 0.5 times one device's" in found(with_tensors(both, both)).likely


@pytest.mark.parametrize(
    "other",
    [fact("b", ratio=0.25), fact("b"), replace(fact("b", rel=0.0), differs=False)],
    ids=["other", "none", "right"],
)
def test_two_ratios_are_no_divisor(other: TensorFact) -> None:
    both = [fact("a", ratio=0.5), other]
    assert "divisor" not in found(with_tensors(both, both)).likely


def test_a_tied_weight_that_is_off_alone() -> None:
    tensors = [fact("embedding", ratio=2.0), replace(fact("a", rel=0.0), differs=False)]
    divergence = found(with_tensors(tensors, tensors))
    assert divergence.name == "embedding"
    assert "also head" in divergence.likely and "here 2 times" in divergence.likely


def test_copies_that_disagree_were_not_reduced() -> None:
    first, second = [fact("a", digest="1"), fact("b", digest="1")], [fact("a", digest="2"), fact("b", digest="2")]
    assert "the gradients differ between ranks" in found(with_tensors(first, second)).likely
    second = [fact("a", digest="2"), fact("b", digest="1")]
    assert "the gradients of a differ between ranks" in found(with_tensors(first, second)).likely


def test_shards_that_are_no_sum() -> None:
    assert "shards are not the sum" in found(with_tensors([shard(0)], [shard(1)])).likely
    right = replace(shard(1, rel=0.0), differs=False)
    assert "only rank(s) 0 are off" in found(with_tensors([shard(0)], [right])).likely


def test_the_largest_difference_is_named() -> None:
    divergence = found(with_tensors([fact("a", rel=0.1)], [fact("a", rel=0.1), fact("b", rel=0.7)]))
    assert (divergence.name, divergence.rank, divergence.by) == ("b", 1, 0.7)


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        (0.6, "misses other ranks' shards"),
        (math.sqrt(2), "counts each of 2 copies"),
        (1.2, "counts some of them twice"),
    ],
)
def test_a_wrong_norm_of_right_gradients(ratio: float, says: str) -> None:
    wrong = tuple(replace(facts, norm=abs(ratio - 1), norm_ratio=ratio) for facts in GOOD)
    divergence = found((wrong[0], wrong[1]))
    assert divergence.what == "norm"
    assert says in divergence.likely


def test_a_step_applied_on_one_rank_only() -> None:
    still = [replace(fact("a", kind="weight"), unchanged=True)]
    divergence = found(with_tensors([replace(fact("a", kind="weight", rel=0.0), differs=False)], still))
    assert (divergence.what, divergence.rank) == ("weight", 1)
    assert "applied on rank(s) 0 only: nothing moved on rank(s) 1" in divergence.likely
    assert "applied on no rank" in found(with_tensors(still, still)).likely


def test_a_stale_shard() -> None:
    moved = replace(shard(1, "b", "weight", rel=0.0), differs=False)
    still = replace(shard(1, "a", "weight"), unchanged=True)
    right = replace(shard(0, "a", "weight", rel=0.0), differs=False)
    divergence = found(with_tensors([right], [still, moved]))
    assert (divergence.name, divergence.rank) == ("a", 1)
    assert "shard [2:4] of a on rank 1 is what it was before" in divergence.likely


def test_other_updates_missing_state_and_buffers() -> None:
    weight = [fact("a", kind="weight")]
    assert "other clipping, learning rate" in found(with_tensors(weight, weight)).likely
    state = [replace(fact("a/exp_avg", kind="state"), missing="plan")]
    divergence = found(with_tensors(state, state))
    assert divergence.what == "state" and "this plan keeps no such state" in divergence.likely
    buffer = [fact("norm.running_mean", kind="buffer")]
    assert "a rank's share of the batch" in found(with_tensors(buffer, buffer)).likely


def test_float32_names_its_own_limit() -> None:
    odd = [replace(fact("a"), digest="x")]
    assert "verify in float64" in found(with_tensors(odd, odd), record=replace(RECORD, dtype="float32")).likely
    assert "verify in float64" not in found(with_tensors(odd, odd)).likely


def test_a_divergence_reads_as_a_sentence() -> None:
    text = str(Divergence(2, "gradient", "head.weight", 1, 0.5, "something is missing"))
    assert text == "step 2: gradient (head.weight) on rank 1 is off by 0.5: something is missing"
    assert str(Divergence(2, "loss", "loss", None, 0.5, "x")) == "step 2: loss is off by 0.5: x"
