"""``tp``: layers cut inside, of models that know nothing of it; one device's numbers, or a refusal with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parity import Figures, check, kinds, prove
from stretto.launch import Job, LocalLauncher
from stretto.verify import verify

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
GPT = {"depth": "1", "width": "32", "context": "16", "heads": "4", "batch": "4", "precision": "fp64"}
PLANS = ("tp=2", "tp=3,microbatches=2", "dp=2,tp=2")
# What is cut: heads in a fused weight, heads with keys of their own and with shared ones, gated layers, towers.
CUTTABLE = ("gpt", "mlp_dropout")
MORE = ("llama", "bert", "ranking", "ignored_labels")  # by `make matrix`


@pytest.mark.parametrize("name", [*CUTTABLE, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE)])
def test_a_model_cut_inside_has_the_numbers_of_one_device_tp01(
    launcher: LocalLauncher, figures: Figures, name: str
) -> None:
    """Four heads on three ranks are 2, 1 and 1; dropout inside a cut layer draws what the whole would."""
    kind = kinds(name)[0]
    plans = PLANS[1:] if name == "llama" else PLANS
    check(prove(launcher, name, plans, {"kind": kind} if name != "mlp_dropout" else {}), f"{name} {kind}", figures)


@pytest.mark.parametrize(
    ("name", "sets"), [("mlp_dropout", {"in_place": "true"}), ("cnn_skips", {"norm": "group", "drop": "0.3"})]
)
def test_dropout_in_place_and_of_channels_draws_for_the_whole(
    launcher: LocalLauncher, figures: Figures, name: str, sets: dict[str, str]
) -> None:
    check(prove(launcher, name, ("tp=3",), sets), f"{name} {sets}", figures)


def test_uneven_parts_leave_what_is_whole_dealt_alike(launcher: LocalLauncher, figures: Figures) -> None:
    """Three heads on two ranks: one has larger parts, and both must have the same shares of what isn't cut."""
    plans = ("dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3")
    check(prove(launcher, "gpt", plans, {"heads": "3", "width": "48", "depth": "3"}), "gpt, uneven parts", figures)


def test_what_tp_can_t_do_is_refused_with_the_reason(launcher: LocalLauncher) -> None:
    (plan,) = verify(ROOT / "tests" / "tasks" / "skips.py", ["tp=2"], launcher=launcher).plans
    assert plan.status == "refused", plan
    assert "tp=2 finds nothing to cut in this model; enter.weight: whole: " in str(plan.reason), plan


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
def test_a_low_precision_cut_inside_rounds_parts_of_sums_and_no_more(
    launcher: LocalLauncher, precision: str
) -> None:
    """Before the first update the loss has but the rounding of its activations, far under what a missing part does."""
    sets = {"precision": precision, "steps": "3"}
    (report,) = prove(launcher, "bert", ("dp=2,tp=2,zero=1",), sets).plans
    assert report.status == "passed" and 0 < (report.loss_max_rel or 0) <= 1e-3, report
    assert (report.grad_max_rel or 0) <= {"bf16": 3e-2, "fp16": 4e-3}[precision], report


def run(launcher: LocalLauncher, entry: str, workers: int, **payload: Any) -> list[Any]:
    result = launcher.run(Job(f"tensor_entries:{entry}", payload, workers, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results)]


def test_a_block_costs_two_messages_each_way_and_a_vocabulary_none_of_the_logits_size_tp07(
    launcher: LocalLauncher,
) -> None:
    """Logits are 4 x 16 x 256; of each token two numbers are told, and its features go in and come back once."""
    activation, tokens = 4 * 16 * 32, 4 * 16
    for depth in (1, 2):
        sets = {**GPT, "depth": str(depth)}
        for found in run(launcher, "messages", 2, task=str(ROOT / "examples" / "gpt"), plan="tp=2", sets=sets):
            assert found["forward"] == [*[activation] * (1 + 2 * depth), 2 * tokens], "the table, the blocks, the loss"
            assert found["backward"] == [activation] * (2 * depth + 1), "the head's input, and the blocks'"
            assert found["evaluation"] == [*[activation] * (1 + 2 * depth), found["logits"]], "an output is gathered"
            assert found["logits"] == 256 * tokens


def test_a_rank_holds_its_part_of_what_is_cut(launcher: LocalLauncher) -> None:
    for found in run(launcher, "parts", 2, task=str(ROOT / "examples" / "gpt"), plan="tp=2", sets=GPT):
        assert found["cut"] and found["held"] == pytest.approx(found["cut"] / 2, rel=0.01)
        assert found["whole"] == found["kept"], "the rest is there whole"
        layers = (f"blocks.0.{layer}" for layer in ("query_key_value", "attention_out", "mlp_up", "mlp_down"))
        assert {name.rpartition(".")[0] for name in found["names"]} == {"embedding", *layers}
