"""The split probe: tasks that no cut keeps are told by name, and those that only look dangerous are let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.assemble import build_template, load_data
from stretto.plan import Plan
from stretto.probes import Findings, refusal, split_probe
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"


def probe(task: Path, **sets: Any) -> Findings:
    loaded = load_task(task, sets)
    return split_probe(loaded, build_template(loaded).structure, load_data(loaded)["train"])


# What is said of each: the function or layer, and the cause.
UNCUTTABLE = (
    ("contrast", "loss(): the sum over 5 samples is", "though each sample's output is the same"),
    ("balance in the loss", "loss(): the sum over 5 samples is", "a balance over it can't be added up"),
    ("balance in the model", "loss(): the sum", "Experts's output[1], one number for a whole batch"),
    ("softmax over batch", "model(): layer 1 (SoftmaxOverBatch) gave a sample other numbers", "mixes samples"),
    ("batch mean", "model(): layer 1 (Center) gave a sample other numbers", "GroupNorm or LayerNorm"),
    ("zero gate", "model(): layer branch (Center) gave a sample other numbers", "mixes samples"),
    ("padding", "loss(): the sum", "collate() pads samples to the longest beside them"),
    ("collate", "collate() gave a sample other numbers", "mixes samples"),
    ("own generator", "model(): layer 1 (Noise) gave something else for the same samples", "a generator of your own"),
    ("system noise", "model(): layer 1 (Noise) gave something else for the same samples", "the system or a clock"),
    ("stateful", "data(): __getitem__(12) gave another sample", "keep no state between reads"),
    ("faint balance", "loss(): the sum over 5 samples is", "though each sample's output is the same"),
    ("no labels", "model(): layer 1 (Center) gave a sample other numbers", "mixes samples"),
    ("metrics", "metrics()['error'] doesn't add up", "summarize()"),
)


@pytest.mark.parametrize(("kind", "where", "why"), UNCUTTABLE)
def test_what_no_cut_keeps_is_told_with_its_place_and_cause(kind: str, where: str, why: str) -> None:
    found = probe(TASKS / "uncuttable.py", kind=kind)
    assert where in found.broken and why in found.broken, found
    assert "\n" not in found.broken


@pytest.mark.parametrize("plan", ["dp=2", "dp=1,microbatches=2", "dp=2,zero=3"])
def test_a_refusal_names_the_plan_and_degree_1_is_never_refused(plan: str) -> None:
    found = probe(TASKS / "uncuttable.py", kind="contrast")
    said = refusal(found, Plan.parse(plan))
    assert said is not None and said.startswith(f"plan {plan} cuts each batch into 2 pieces, but loss()")
    assert "dp=1,microbatches=1" in said
    assert refusal(found, Plan()) is None


@pytest.mark.parametrize("kind", ["normalises", "rebinds"])
def test_a_forward_that_writes_into_a_parameter_is_refused_where_all_ranks_read_it(kind: str) -> None:
    """It gives the same whenever it runs alone, so only the parameter itself tells of it."""
    found = probe(TASKS / "edge_parts.py", kind=kind)
    assert not found.broken and found.written == "layer.weight"
    said = refusal(found, Plan.parse("dp=2,zero=3"))
    assert said is not None and "forward changes the parameter layer.weight" in said and "zero=0" in said
    assert refusal(found, Plan.parse("dp=2,zero=2")) is None
    assert probe(TASKS / "edge_parts.py", kind="plain").written == ""
    assert probe(TASKS / "hard_parts.py").written == ""


def test_a_mean_returned_as_a_sum_is_told_by_its_weight_ls01() -> None:
    found = probe(TASKS / "uncuttable.py", kind="mean")
    assert "the weight over 5 samples is 1, over pieces of 3 and 2 2" in found.broken
    assert "looks like a mean" in found.broken and "stretto.losses" in found.broken


def test_a_mean_made_inside_the_model_is_told_with_the_model_ls03() -> None:
    """Its tokens are averaged in forward, and the loss multiplies by samples: wrong as soon as lengths differ."""
    found = probe(TASKS / "uncuttable.py", kind="own mean")
    assert "loss(): the sum" in found.broken and "Mean's output, one number for a whole batch" in found.broken


@pytest.mark.parametrize(("kind", "buffer"), [("running mean", "1.mean"), ("instance norm", "1.running_mean")])
def test_a_buffer_that_pieces_change_in_their_own_way_is_refused_dp01(kind: str, buffer: str) -> None:
    found = probe(TASKS / "uncuttable.py", kind=kind)
    assert (found.broken, found.buffer) == ("", buffer)
    for plan in ("dp=2", "dp=1,microbatches=2"):
        said = refusal(found, Plan.parse(plan))
        assert said is not None and f"forward changes the buffer {buffer}" in said
    assert refusal(found, Plan()) is None


def test_a_buffer_that_each_forward_changes_alike_is_refused_for_microbatches_only() -> None:
    found = probe(TASKS / "odd_parts.py")
    assert (found.broken, found.buffer, found.counter) == ("", "", "calls")
    assert refusal(found, Plan.parse("dp=2,zero=3")) is None
    said = refusal(found, Plan.parse("dp=2,microbatches=3"))
    assert said is not None and "a step has 3 forwards where one device has one" in said


CUTTABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("tests/tasks/cuttable.py", {"kind": kind})
        for kind in (
            *("mlp", "packed lstm", "masked attention", "token layers", "dropout", "batch norm", "layer norm"),
            *("group norm", "dropped layers", "noise", "half precision", "weights"),
        )
    ),
    ("tests/tasks/ignored_labels.py", {}),
    ("tests/tasks/lstm.py", {}),
    ("tests/tasks/mlp_dropout.py", {}),
    ("tests/tasks/llama.py", {}),
    ("tests/tasks/traps.py", {"kind": "complex"}),
    *((path.relative_to(ROOT).as_posix(), {}) for path in sorted((ROOT / "examples").glob("*/task.py"))),
    ("examples/gpt/task.py", {"dropout": 0.2}),
)


@pytest.mark.parametrize(("task", "sets"), CUTTABLE)
def test_what_every_cut_keeps_is_let_through_without_a_word(task: str, sets: dict[str, Any]) -> None:
    assert probe(ROOT / task, **sets) == Findings()


def test_spectral_norm_counts_forwards_and_not_samples() -> None:
    found = probe(TASKS / "cuttable.py", kind="spectral norm")
    assert found.broken == found.buffer == "" and found.counter.startswith("2.parametrizations.weight")


def test_layers_that_samples_choose_are_refused_where_ranks_gather_them_together() -> None:
    found = probe(TASKS / "traps.py", kind="experts")
    assert found == Findings(layers="layers.0")
    said = refusal(found, Plan.parse("dp=2,zero=3"))
    assert said is not None and "the layer layers.0 runs for some samples" in said and "zero=2" in said
    assert refusal(found, Plan.parse("dp=2")) is None
    assert refusal(found, Plan.parse("dp=1,zero=3")) is None


def test_draws_that_nobody_holds_still_cost_a_note_and_no_refusal(tmp_path: Path) -> None:
    text = (
        (TASKS / "cuttable.py")
        .read_text()
        .replace("torch.randn_like(h)", "torch.from_numpy(numpy.random.standard_normal(h.shape))")
    )
    (tmp_path / "noisy.py").write_text(text.replace("import random\n", "import random\nimport numpy\n"))
    found = probe(tmp_path / "noisy.py", kind="noise")
    assert found.broken == ""
    assert len(found.notes) == 1 and "draws random numbers in a way that could not be held still" in found.notes[0]


def test_the_probe_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    probe(TASKS / "mlp_dropout.py")
    assert torch.equal(torch.get_rng_state(), before)


def test_findings_come_back_from_json_and_nothing_else_does() -> None:
    found = Findings(broken="b", layers="l", reach="tensor", reach_error=0.5, notes=("n", "m"))
    assert Findings.from_json(found.to_json()) == found
    for damaged in (
        {},
        {**found.to_json(), "more": 1},
        {**found.to_json(), "broken": 1},
        {**found.to_json(), "notes": [1]},
    ):
        with pytest.raises(ValueError):
            Findings.from_json(damaged)
