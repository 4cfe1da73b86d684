"""Peak memory, counted by hand and compared; the probability that it doesn't fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from stretto.planner.constants import Constants
from stretto.planner.described import Described
from stretto.planner.hardware import Machines, find_device
from stretto.planner.memory import (
    ALLOCATOR,
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    Memory,
    peak_memory,
)
from stretto.planner.risk import DESCRIBED, MOST_RISK, most_bytes, probability_over, rehearsed
from stretto.planner.score import Scorer
from stretto.planner.setups import SCHEDULES, Setups
from stretto.planner.software import Activations, Software, States, read_software
from stretto.planner.space import Space
from stretto.planner.transformer import Transformer

MODEL = Transformer(layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=1000, tied=True)
PLAIN: dict[str, Any] = {
    **{"dp": 1, "tp": 1, "pp": 1, "chunks": 1, "zero": 0, "micro": 2, "microbatches": 16, "sequence": 128},
    **{"parallel_sequence": False, "full": False, "selective": False, "flash": True, "hidden": False, "fp8": False},
    **{"compute_bytes": 2, "gradient_bytes": 4},
}
TOKENS = 256
PAPER = Software(flash=False, stages="even", activations=Activations(dropout=True))


def memory(software: Software = Software(), cut: tuple[int, ...] | None = None, **changes: Any) -> Memory:  # noqa: B008
    return peak_memory(MODEL, Setups.of([PLAIN | changes]), software, cut)


def total(software: Software = Software(), **changes: Any) -> float:  # noqa: B008
    return float(memory(software, **changes).total[0])


def held(layers: int = 8, tp: int = 1) -> float:
    return (layers * MODEL.layer_parameters + MODEL.table) / tp


@pytest.mark.parametrize(
    ("zero", "shard", "each"),
    [
        (0, 8, 2 + 4 + 12),
        (1, 8, 2 + 4 + 12 / 8),
        (1, 4, 2 + 4 + 12 / 4),
        (2, 8, 2 + (4 + 12) / 8),
        (3, 8, 18 / 8),
        (3, 2, 18 / 2),
    ],
)
def test_states_are_what_zero_leaves_of_them(zero: int, shard: int, each: float) -> None:
    assert memory(dp=8, zero=zero, shard=shard).states[0] == pytest.approx(each * held())


def test_states_of_float32_have_no_copies() -> None:
    assert memory(compute_bytes=4).states[0] == pytest.approx((4 + 4 + 8) * held())


def test_states_of_a_system_whose_weights_are_the_optimizers() -> None:
    software = Software(states=States(weights_apart=False))
    assert memory(software, dp=8, zero=3).states[0] == pytest.approx((4 + 12) / 8 * held())
    assert memory(software, dp=8, zero=2).states[0] == pytest.approx((2 + 16 / 8) * held())


def test_what_is_offloaded_is_gone_and_nothing_else() -> None:
    kept, gone = memory(dp=4, zero=1), memory(dp=4, zero=1, offload=True)
    assert kept.states[0] - gone.states[0] == pytest.approx(12 / 4 * held())
    assert kept.activations[0] == gone.activations[0]


@pytest.mark.parametrize(
    ("tp", "parts", "each"),
    [
        (1, False, 34 + 5 * 8 * 128 / 512),
        (4, False, 10 + 24 / 4 + 5 * 8 * 128 / 512 / 4),
        (4, True, (34 + 5 * 8 * 128 / 512) / 4),
    ],
)
def test_activations_are_those_of_the_paper(tp: int, parts: bool, each: float) -> None:
    """arXiv 2205.05198, equations 1, 2 and 4."""
    found = memory(PAPER, tp=tp, parallel_sequence=parts, flash=False)
    assert found.activations[0] == pytest.approx(8 * TOKENS * 512 * each)


def test_recomputation_leaves_inputs_and_one_layer() -> None:
    layer, square = 34 * TOKENS * 512, 5 * 8 * 128 * TOKENS
    full = memory(PAPER, full=True, flash=False).activations[0]
    assert full == pytest.approx(8 * 2 * TOKENS * 512 + 2 * layer + square)
    selective = memory(PAPER, selective=True, flash=False).activations[0]
    assert selective == pytest.approx(8 * layer + 2 * layer + square)
    assert total(PAPER, full=True) < total(PAPER, flash=False, selective=True) < total(PAPER, flash=False)


def test_half_of_the_products_are_computed_again_where_selective_means_that() -> None:
    software = Software(activations=Activations(selective="products"))
    layer = memory(software).activations[0] / 8
    kept = 2 * TOKENS * (512 + 512 + (3 * 512 + 2 * 512 + 2048) / 2)
    assert memory(software, selective=True).activations[0] == pytest.approx(8 * kept + 2 * layer)


def test_gathered_inputs_are_whole_where_they_are_kept() -> None:
    parts = {"tp": 4, "parallel_sequence": True}
    more = 2 * 2 * 512 * TOKENS * (1 - 1 / 4) * 8
    by = {gathered: Software(activations=Activations(gathered=gathered)) for gathered in ("never", "behind", "always")}
    never = memory(by["never"], **parts).activations[0]
    assert memory(by["always"], **parts).activations[0] - never == pytest.approx(more)
    assert memory(by["behind"], **parts).activations[0] - never == pytest.approx(more)
    idle = peak_memory(MODEL, Setups.of([PLAIN | parts]), by["behind"], behind=np.array([False]))
    assert idle.activations[0] - never == pytest.approx(more), "alone, a host waits for nobody"
    several = Setups.of([PLAIN | parts | {"pp": 2}])
    found = [
        peak_memory(MODEL, several, by["behind"], behind=np.array([behind])).activations[0] for behind in (True, False)
    ]
    assert found[1] < found[0]
    assert found[1] == pytest.approx(peak_memory(MODEL, several, by["never"]).activations[0])


def test_gated_and_grouped_layers_keep_their_own_sizes() -> None:
    model = Transformer(layers=1, hidden=512, heads=8, kv_heads=2, ffn=1024, vocab=8, gated=True)
    for compiled, ups in ((False, 4), (True, 3)):
        software = Software(activations=Activations(compiled=compiled, projections=True))
        found = peak_memory(model, Setups.of([PLAIN]), software).activations[0]
        # Inputs of the layer, of its norms; queries, keys and values, turned and not; attention's result.
        each = 2 * 512 + 2 * 512 + (512 + 256) + (512 + 128) + 512 + ups * 1024
        assert found == pytest.approx(2 * TOKENS * each)


LAYER = 32 * TOKENS * 512  # without dropout
ENDS = 2 * 2 * TOKENS * 512  # a stage's input and output


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"microbatches": 16}, 4 * 2),
        ({"microbatches": 3}, 3 * 2),
        ({"microbatches": 16, "schedule": SCHEDULES.index("gpipe")}, 16 * 2),
        ({"microbatches": 16, "schedule": SCHEDULES.index("zero-bubble")}, 4 * 2),
        ({"microbatches": 16, "chunks": 2, "schedule": SCHEDULES.index("interleaved")}, 4 * 2 * (1 + 3 / (4 * 2))),
    ],
)
def test_a_first_stage_holds_the_microbatches_of_its_schedule(changes: dict[str, Any], layers: float) -> None:
    setups = Setups.of([PLAIN | {"pp": 4} | changes])
    found = peak_memory(MODEL, setups, Software(stages="even"), first=True)
    assert found.activations[0] == pytest.approx(layers * LAYER + layers / 2 * ENDS)


def test_the_last_stage_counts_where_the_vocabulary_is_large() -> None:
    wide = Transformer(layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=200_000)
    setups = Setups.of([PLAIN | {"pp": 4}])
    found = peak_memory(wide, setups, Software(stages="even"))
    assert found.stage[0] == 3
    assert found.logits[0] == pytest.approx(TOKENS * 200_000 * (2 + 3 * 4))
    assert peak_memory(wide, setups, Software(stages="even"), first=True).logits[0] == 0


def test_a_balanced_cut_leaves_the_output_layer_room() -> None:
    units = 3.0  # layers that the output layer costs
    model = Transformer(8, 512, 8, 8, 2048, vocab=int(units * MODEL.layer_matrices / 512))
    setups = Setups.of([PLAIN | {"pp": 2}])
    first = peak_memory(model, setups, first=True)
    assert first.activations[0] == pytest.approx(2 * 6 * LAYER + 2 * ENDS)  # 5.5, rounded up
    even = peak_memory(model, setups, Software(stages="even"), first=True)
    assert even.activations[0] == pytest.approx(2 * 4 * LAYER + 2 * ENDS)


def test_a_cut_that_is_given_is_kept_and_its_worst_stage_found() -> None:
    found = memory(cut=(1, 5, 1, 1), pp=4)
    assert found.stage[0] == 1
    assert found.activations[0] == pytest.approx(3 * 5 * LAYER + 3 * ENDS)


def test_a_measured_layer_stands_for_the_counted_one() -> None:
    found = peak_memory(MODEL, Setups.of([PLAIN]), layer_bytes=1000.0)
    assert found.activations[0] == pytest.approx(8 * TOKENS * 1000)


def test_context_parallelism_divides_tokens() -> None:
    one, two = memory(), memory(cp=2)
    assert two.activations[0] == pytest.approx(one.activations[0] / 2)
    assert two.logits[0] == pytest.approx(one.logits[0] / 2)
    assert two.states[0] == one.states[0]


def test_buffers_of_messages() -> None:
    software = Software(states=States(copy_bytes=2, bucket_elements=1000))
    assert memory(software).buckets[0] == 0
    assert memory(software, dp=2).buckets[0] == pytest.approx(2 * held())
    assert memory(software, dp=2, zero=1).buckets[0] == pytest.approx(2 * held() + 2 * 2 * 1000)
    assert memory(dp=2, zero=2).gathers[0] == 0
    assert memory(dp=2, zero=3).gathers[0] > 3 * 2 * MODEL.layer_parameters


def test_kinds_of_memory_add_up() -> None:
    found, alone = memory(dp=4, zero=3), memory()
    parts = (found.states, found.activations, found.logits, found.gathers, found.buckets)
    assert found.allocated[0] == pytest.approx(sum(part[0] for part in parts))
    assert found.reserved[0] - found.allocated[0] == pytest.approx(ALLOCATOR * sum(part[0] for part in parts[1:4]))
    assert found.total[0] - found.reserved[0] == pytest.approx(CONTEXT_BYTES + COMMUNICATION_BYTES)
    assert alone.total[0] - alone.reserved[0] == pytest.approx(CONTEXT_BYTES)


def test_many_setups_at_once_are_each_alone() -> None:
    rows = [
        PLAIN | {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "full": full, "chunks": chunks}
        for dp in (1, 4)
        for tp in (1, 2)
        for pp, chunks in ((1, 1), (2, 1), (4, 2))
        for zero in range(4)
        for full in (False, True)
    ]
    together = peak_memory(MODEL, Setups.of(rows)).total
    alone = [peak_memory(MODEL, Setups.of([row])).total[0] for row in rows]
    np.testing.assert_array_equal(together, alone)


def test_probability_is_of_a_normal_logarithm() -> None:
    for share in (0.5, 0.8, 0.97, 1.0, 1.02, 1.3, 3.0):
        for spread in (rehearsed(False, True, "C library").spread, DESCRIBED):
            said = probability_over(7e9 * share, 7e9, spread)
            assert said == pytest.approx((1 + math.erf(math.log(share) / spread / math.sqrt(2))) / 2, rel=1e-12)
            if 0.01 < said < 0.99:
                assert most_bytes(7e9, said, spread) == pytest.approx(7e9 * share)
    assert probability_over(7e9, None, DESCRIBED) == 0.0
    assert probability_over(0.0, 7e9, DESCRIBED) == 0.0
    assert most_bytes(7e9, 1.0, DESCRIBED) == math.inf


def test_what_may_be_proposed_is_what_is_likely_enough_to_fit() -> None:
    large = replace(MODEL, layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152)
    space = Space(Described(large, 2048), Machines(find_device("A100"), 64), 256, Software())
    scorer = Scorer(space, Constants())
    found = scorer.memory(space.cores)
    fits = scorer.fits(found)
    assert 0 < fits.sum() < len(fits)
    np.testing.assert_array_equal(fits, scorer.risk(found) <= MOST_RISK)


def test_facts_are_known_of_every_system_and_a_slip_is_refused() -> None:
    assert read_software()["stretto"] == Software()
    assert read_software()["nanotron"].activations.gathered == "behind"
    for slip in ({"flahs": True}, {"states": {"copy": 2}}, {"activations": {"gathered": "sometimes"}}):
        with pytest.raises(ValidationError):
            TypeAdapter(Software).validate_python(slip)
