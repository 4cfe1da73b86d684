"""How long a step takes: counted by hand beside the planner's count, and constants where none were fitted."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stretto.planner import MEANINGS, Constants, Machines, Setups, Transformer, find_constants, find_device, step_time
from stretto.planner.collectives import Links
from stretto.planner.constants import FALL, likely, read_sets
from stretto.planner.layer import (
    BACKWARD_KERNELS,
    EIGHTH_MESSAGES,
    FORWARD_KERNELS,
    KERNEL_SECONDS,
    SHOWN,
    SLOWER,
    SOFTMAX_PARTS,
    UNALIGNED,
    LayerModel,
    LayerTime,
)
from stretto.planner.published import Published, read_rows
from stretto.planner.step import OPTIMIZER_BYTES

MODEL = Transformer(layers=24, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=50304)
FREE = Constants(1, 1, 1, 1e-9, 0, 1, 1, 1e-12)  # nothing falls short of the device, and hosts take no time
A100 = find_device("A100-SXM4-80GB")
ONE: dict[str, Any] = {
    **dict.fromkeys(("dp", "tp", "pp", "chunks", "microbatches"), 1),
    **dict.fromkeys(("parallel_sequence", "full", "selective", "hidden", "fp8"), False),
    **{"zero": 0, "micro": 4, "sequence": 2048, "flash": True, "compute_bytes": 2, "gradient_bytes": 2},
}


def layer(constants: Constants = FREE, model: Transformer = MODEL, device: str = A100.name, **setup: Any) -> LayerTime:
    """Of one setup; its arrays have one entry."""
    machines = Machines(find_device(device), 64)
    setups = Setups.of([{**ONE, **setup}])
    return LayerModel(model, machines, Links(machines, constants), "bf16").times(setups)


def test_a_layer_is_its_products_its_passes_and_its_kernels() -> None:
    tokens, hidden = 4 * 2048, MODEL.hidden
    products = 3 * 2 * tokens * 12 * hidden**2 / A100.peak["bf16"]
    attention = (0.5 + 1.25) * 4 * 2048 * tokens * hidden / A100.peak["bf16"]
    inside = (2 + 2 + 3 + 4) * 4 * hidden + (6 + 9) * hidden  # the feed-forward layer's, then attention's
    passes = 2 * tokens * ((12 + 16) * hidden + inside) / A100.memory_rate
    kernels = (3 * 4 + FORWARD_KERNELS + BACKWARD_KERNELS) * KERNEL_SECONDS
    assert layer().layer[0] == pytest.approx(products + attention + passes + kernels)


def test_a_product_of_few_rows_takes_the_time_to_read_its_matrix() -> None:
    wide = Transformer(1, 8192, 64, 64, 32768, 50304)
    few = layer(model=wide, micro=1, sequence=1).layer[0] - (12 + FORWARD_KERNELS + BACKWARD_KERNELS) * KERNEL_SECONDS
    assert few == pytest.approx(3 * 2 * wide.layer_matrices / A100.memory_rate, rel=0.02)


def test_what_is_computed_again_is_added() -> None:
    plain = layer(flash=False).layer[0]
    full, half, selective = (layer(flash=False, **{name: True}).layer[0] for name in ("full", "half", "selective"))
    tokens = 4 * 2048
    attention = 4 * 2048 * tokens * MODEL.hidden / A100.peak["bf16"]
    square = 5 * 2 * tokens * 2048 * MODEL.heads / A100.memory_rate
    assert selective - plain == pytest.approx(attention + square)
    assert half - plain == pytest.approx((full - plain) / 2)
    assert 0.3 < (full - plain) / plain < 0.36


def test_rows_that_are_not_aligned_slow_products_down() -> None:
    heads = Transformer(24, 13824, 128, 128, 4 * 13824, 50304)  # of 108 features
    even = Transformer(24, 13824, 108, 108, 4 * 13824, 50304)  # of 128
    attention = (0.5 + 1.25) * 4 * 2048 * 4 * 2048 * 13824 / A100.peak["bf16"]
    found = layer(model=heads).layer[0] - layer(model=even).layer[0]
    assert found == pytest.approx(attention * (1 / UNALIGNED - 1))


def test_a_vocabulary_that_is_not_aligned_is_slow_on_one_rank_and_filled_up_on_several() -> None:
    odd = Transformer(24, 4096, 32, 32, 16384, 50257)
    assert layer(model=odd).head[0] > 2.5 * layer().head[0]
    assert layer(model=odd, tp=2).head[0] == pytest.approx(layer(tp=2).head[0], rel=0.02)


def test_messages_are_rings_beside_a_latency_that_only_launches_hide() -> None:
    slow = Constants(1, 1, 1, 1e-9, 0, 0.5, 1, 1e-3)
    ring = 2 * 7 / 8 * 2 * 4 * 2048 * 4096 / (0.5 * A100.link_rate)
    assert layer(slow, tp=8).messages[0] == pytest.approx(4 * (ring + 3e-3))
    assert layer(slow, tp=8, full=True).messages[0] == pytest.approx(6 * (ring + 3e-3))
    assert layer(slow, tp=8, hidden=True).messages[0] == pytest.approx(4 * (SHOWN * ring + 3e-3))
    assert layer(slow, tp=1).messages[0] == 0
    waits = layer(slow, tp=8).layer[0] - layer(replace(slow, latency_seconds=1e-12), tp=8).layer[0]
    assert waits == pytest.approx(4 * 3e-3)
    bound = Constants(1, 1, 1, 1.0, 0, 0.5, 1, 1e-3)  # by launches, behind which a message's latency goes
    assert layer(bound, tp=8).layer[0] == pytest.approx(3.0 * (1 + 3 * SLOWER))


def test_a_layer_takes_at_least_its_launches() -> None:
    slow = Constants(1, 1, 1, 0.5, 0, 1, 1, 1e-12)
    assert layer(slow).layer[0] == pytest.approx(1.5)
    assert layer(slow, full=True).layer[0] == pytest.approx(2.0)
    assert layer(slow, flash=False, micro=1, tp=8).layer[0] == pytest.approx(
        1.5 * (1 + 3 * SLOWER)
    )  # 4 heads: one kernel's softmax
    assert layer(slow, flash=False, micro=1, tp=16).layer[0] == pytest.approx(1.5 * SOFTMAX_PARTS * (1 + 4 * SLOWER))
    assert layer(slow, flash=True, micro=1, tp=16).layer[0] == pytest.approx(1.5 * (1 + 4 * SLOWER))


def test_hosts_hold_up_layers_whose_messages_leave_them() -> None:
    stall = Constants(1, 1, 1, 1e-9, 1.0, 1, 1, 1e-12)
    assert layer(stall, tp=2, pp=4).layer[0] < 1
    assert layer(stall, tp=2, pp=4, dp=2).layer[0] == pytest.approx(6)
    assert layer(stall, tp=1, pp=8, dp=2).layer[0] < 1
    assert layer(stall, tp=16).layer[0] == pytest.approx(16 * 0.3)
    assert layer(stall, tp=32).layer[0] == pytest.approx(32 * 0.6)


def test_eight_bits_are_faster_but_not_with_a_scale_for_each_row() -> None:
    h100, big = "H100-SXM5-80GB", {"micro": 16, "tp": 8, "parallel_sequence": True}
    usual, eighth = layer(device=h100, **big), layer(device=h100, fp8=True, **big)
    rows = layer(device=h100, fp8=True, rowwise=True, **big)
    assert eighth.layer[0] < usual.layer[0] < rows.layer[0]
    assert eighth.messages[0] == pytest.approx(EIGHTH_MESSAGES * usual.messages[0])
    assert rows.messages[0] == pytest.approx(usual.messages[0])
    apart = layer(device=h100, fp8=True, **{**big, "parallel_sequence": False})
    assert apart.messages[0] == pytest.approx(usual.messages[0])
    tokens, rate = 16 * 2048, find_device(h100).memory_rate
    cut = 7 / 8 * tokens * MODEL.hidden / rate  # an element of what the ranks have in parts, not whole
    saved = 2 * (12 + 16) * cut + 3 * 3 * 2 * cut  # by what runs beside cut layers, and by two conversions, thrice
    saved += (1 - EIGHTH_MESSAGES) * usual.messages[0]
    assert apart.layer[0] - eighth.layer[0] == pytest.approx(saved)


def test_an_update_reads_and_writes_its_parameters_once() -> None:
    machines = Machines(A100, 8)
    both = Setups.of([{**ONE}, {**ONE, "dp": 8, "zero": 1}])
    whole, cut = step_time(MODEL, machines, FREE, both, "bf16").update
    assert whole == pytest.approx(OPTIMIZER_BYTES * MODEL.parameters / A100.memory_rate)
    assert cut == pytest.approx(whole / 8)


def test_ranks_that_update_a_part_gather_weights_among_those_that_have_the_others() -> None:
    """Four hosts: sums pass between them either way, weights only where parts lie in more than one."""
    machines = Machines(A100, 32)
    plans = [{}, {"zero": 1}, {"zero": 1, "shard": 8}, {"zero": 1, "gradient_bytes": 4}]
    whole, cut, group, wide = step_time(
        MODEL, machines, FREE, Setups.of([{**ONE, "dp": 32, **plan} for plan in plans]), "bf16"
    ).data
    num_bytes = 2 * MODEL.parameters
    inside, between = 7 / 8 * num_bytes / A100.link_rate, 3 / 4 * num_bytes / 8 / machines.network_rate
    held = pytest.approx(2 * (inside + between), rel=1e-3)
    assert whole == held
    assert cut == held, "an all-reduce is a scatter and a gather"
    assert group == held, "so it is of both halves, by whatever ranks"
    assert wide == pytest.approx(3 * (inside + between), rel=1e-3), "weights have two bytes, whatever gradients have"


def test_gradients_that_go_beside_the_last_backward_leave_the_weights() -> None:
    machines = Machines(A100, 32)
    plans = [{"zero": 1, "shard": shard, "overlapped": True, "micro": 32} for shard in (32, 8)]
    found = step_time(MODEL, machines, FREE, Setups.of([{**ONE, "dp": 32, **plan} for plan in plans]), "bf16").data
    num_bytes = 2 * MODEL.parameters
    inside, between = 7 / 8 * num_bytes / A100.link_rate, 3 / 4 * num_bytes / 8 / machines.network_rate
    assert found[0] == pytest.approx(inside + between, rel=1e-3)
    assert found[1] == pytest.approx(inside, rel=1e-3)


def test_each_constant_has_a_meaning_and_no_share_is_over_all_there_is() -> None:
    assert [field.name for field in fields(Constants)] == list(MEANINGS)
    assert len(MEANINGS) <= 8
    for name, one in read_sets().items():
        shares = (one.matmul, one.attention, one.memory, one.inside, one.between)
        assert max(shares) <= 1, name
        find_device(name.partition("/")[0])


def test_a_constant_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="matmul must be over 0, got -1"):
        Constants(matmul=-1)
    with pytest.raises(ValueError, match="inside"):
        Constants(inside=math.nan)


def test_constants_of_what_has_no_set_are_those_of_the_same_system_nearby_or_of_all() -> None:
    sets = {
        "A100-SXM4-80GB/megatron-lm": Constants(matmul=0.1),
        "A100-SXM4-80GB/nanotron": Constants(matmul=0.2),
        "A100-SXM4-40GB/nanotron": Constants(matmul=0.4),
        "H100-SXM5-80GB/nanotron": Constants(matmul=0.5),
        "V100-SXM2-32GB/internevo": Constants(matmul=0.9),
    }

    def matmul(device: str, software: str) -> float:
        return likely(device, software, sets).matmul

    assert matmul("A100-SXM4-80GB", "nanotron") == 0.2  # its own
    assert matmul("A100-PCIE-80GB", "megatron-lm") == 0.1  # that system on its family
    assert matmul("A100-SXM4-40GB", "megatron-lm") == 0.1
    assert matmul("A100-PCIE-80GB", "nanotron") == pytest.approx(0.3)
    scaled = [0.1, 0.2, 0.4, 0.5 * (989 / 312) ** FALL, 0.9 * (125 / 312) ** FALL]
    assert matmul("A100-SXM4-80GB", "torchtitan") == pytest.approx(sorted(scaled)[2])  # all, as they would be on it
    faster = (A100.peak["bf16"] / find_device("B200").peak["bf16"]) ** FALL
    assert matmul("B200-SXM-180GB", "nanotron") == pytest.approx(sorted(scaled)[2] * faster)
    assert likely("B200-SXM-180GB", "nanotron", {}) == Constants()


def test_shares_fall_as_rates_rise_and_other_constants_stay() -> None:
    one = Constants(0.9, 0.4, 0.9, 2e-3, 1e-4, 0.6, 0.4, 3e-5)
    v100, h100 = (find_device(name) for name in ("V100", "H100"))
    found = likely(h100.name, "nanotron", {f"{v100.name}/nanotron": one})
    falls = [h100.peak["bf16"] / v100.peak["fp16"]] * 2 + [h100.memory_rate / v100.memory_rate]
    for name, fall in zip(("matmul", "attention", "memory"), falls, strict=True):
        assert getattr(found, name) == pytest.approx(getattr(one, name) * fall**-FALL)
    kept = ("launch_seconds", "stall_seconds", "inside", "between", "latency_seconds")
    assert [getattr(found, name) for name in kept] == [getattr(one, name) for name in kept]
    assert likely(v100.name, "nanotron", {f"{h100.name}/nanotron": one}).matmul == 1.0, "no share is over all there is"


def test_a_set_that_there_is_is_taken_as_it_is() -> None:
    for name, one in read_sets().items():
        assert find_constants(*name.split("/")) == one


ROW: dict[str, Any] = {
    "source": "torchtitan",
    "model": {"name": "m", "layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000, "mlp": "swiglu"},
    "hardware": {"gpu": "A100-80GB", "count": 64},
    "parallel": {"dp": 64, "tp": 1, "pp": 1, "zero": 3},
    "batch": {"micro": 2, "global": 128, "seq": 4096},
    "precision": "bf16 mixed",
    "recompute": "none",
    "result": {"iter_s": 3.7891},
}


def read(path: Path, **changed: Any) -> Published:
    """A row with those keys changed."""
    path = path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, **changed}), encoding="utf-8")
    ((_, row),) = read_rows(path)
    assert isinstance(row, Published)
    return row


def test_rows_say_what_is_computed_again_and_in_what(tmp_path: Path) -> None:
    assert not read(tmp_path).setup["half"]
    assert read(tmp_path, recompute="selective(op)").setup["half"]
    assert not read(tmp_path, recompute="selective", source="megatron_seqsel_paper").setup["half"]
    assert read(tmp_path, recompute="full", source="bigscience_bloom_tuning").setup["full"]
    assert not read(tmp_path, recompute="full", source="vtrain_single").setup["full"]
    assert read(tmp_path, precision="fp8 linear (rowwise) + bf16").setup["rowwise"]
    assert not read(tmp_path, precision="fp8 linear (tensorwise) + bf16").setup["rowwise"]


def test_a_network_that_is_not_said_is_its_device_s(tmp_path: Path) -> None:
    assert read(tmp_path).machines.network_rate == 25e9
    assert read(tmp_path, hardware={"gpu": "H100-80GB-SXM", "count": 64}).machines.network_rate == 50e9
    said = {"gpu": "A100-80GB", "count": 64, "per_node": 8, "inter": "4x100 Gb/s RoCE per node"}
    assert read(tmp_path, hardware=said).machines.network_rate == 6.25e9


@pytest.mark.parametrize(
    ("model", "heads", "plan", "seconds"),
    [
        pytest.param((24, 2304), 24, {"dp": 32, "micro": 16}, 3.528, id="1.7B"),
        pytest.param((96, 12288), 96, {"tp": 8, "pp": 8, "chunks": 3, "microbatches": 64}, 18.13, id="175B"),
        pytest.param((128, 25600), 160, {"tp": 8, "pp": 64, "microbatches": 512}, 94.42, id="1T"),
    ],
)
def test_published_steps_are_met(model: tuple[int, int], heads: int, plan: dict[str, int], seconds: float) -> None:
    """arXiv 2104.04473, table 1, and 2205.05198, table 5."""
    layers, hidden = model
    one = Transformer(layers, hidden, heads, heads, 4 * hidden, 51200)
    setup = {**ONE, "micro": 1, **plan, "full": True, "flash": False}
    machines = Machines(A100, math.prod(setup[axis] for axis in ("dp", "tp", "pp")))
    constants = find_constants(A100.name, "megatron-lm")
    found = step_time(one, machines, constants, Setups.of([setup]), "fp16", stages="even")
    assert found.total[0] == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "milliseconds"),
    [
        pytest.param({}, 19.6, id="plain"),
        pytest.param({"parallel_sequence": True}, 19.0, id="sequence"),
        pytest.param({"full": True}, 27.2, id="full"),
        pytest.param({"selective": True}, 20.9, id="selective"),
        pytest.param({"selective": True, "parallel_sequence": True}, 20.3, id="selective-sequence"),
    ],
)
def test_a_published_layer_is_met(changed: dict[str, bool], milliseconds: float) -> None:
    """arXiv 2205.05198, table 4: one layer of 22B, which nothing was fitted to."""
    one = Transformer(48, 6144, 64, 64, 24576, 51200)
    found = layer(find_constants(A100.name, "megatron-lm"), one, tp=8, flash=False, **changed)
    assert 1e3 * found.layer[0] == pytest.approx(milliseconds, rel=0.13)
