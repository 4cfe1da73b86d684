"""``zero=3`` beside ``tp``, ``pp`` and ``branch`` where no memory can be shared: pieces of the traced graph are
gathered before they run. And several copies of cut weights beside these axes, shared or gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parity import Figures, check, kinds, prove
from stretto.launch import Job, LocalLauncher
from stretto.plan import Plan
from stretto.verify import verify

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
CONDITION = "stretto.testing.conditions:"
MANY = f"{CONDITION}separate_memory,{CONDITION}small_pieces,{CONDITION}even_stages"
NO_MEMORY = f"{CONDITION}no_free_memory"
MATRIX = pytest.mark.matrix
LLAMA = {"task": str(ROOT / "tests" / "tasks" / "llama.py"), "sets": {"precision": "fp64"}}

# A piece for each operation that has parameters.
CASES = (
    ("gpt", {}, ("dp=2,tp=2,zero=3", "dp=2,pp=2,zero=3,microbatches=3,schedule=zero-bubble")),
    ("cnn_skips", {"size": "17"}, ("dp=2,pp=2,zero=3",)),  # BatchNorm, and a batch of three: a ghost on four workers
)
MORE = (
    ("gpt", {}, ("dp=3,pp=2,zero=3,microbatches=2,recompute=selective",)),  # batches of one and two at a time
    ("gpt", {}, ("dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,pp=2,microbatches=2")),
    ("gpt", {}, ("dp=2,pp=2,zero=3,schedule=interleaved,microbatches=2", "dp=2,tp=2,zero=3,recompute=full")),
    ("towers", {}, ("dp=2,branch=2,zero=3", "dp=2,branch=2,pp=2,zero=3,microbatches=2")),
    ("gpt", {}, ("dp=2,tp=2,pp=2,zero=3,microbatches=2", "dp=3,tp=2,zero=3,microbatches=2,recompute=full")),
    ("cnn_skips", {"norm": "group"}, ("dp=2,pp=2,zero=3,microbatches=3,schedule=zero-bubble", "dp=2,tp=2,zero=3")),
    ("cnn_skips", {"size": "17"}, ("dp=4,pp=2,zero=3",)),
    ("towers", {"size": "15"}, ("dp=2,pp=2,zero=3,microbatches=3,schedule=zero-bubble", "dp=2,tp=2,branch=2,zero=3")),
    ("t5", {}, ("dp=2,pp=2,zero=3,microbatches=2", "dp=2,tp=2,zero=3,sequence=true")),
    ("bert", {}, ("dp=2,tp=2,zero=3,recompute=selective", "dp=2,pp=2,zero=3,recompute=full,schedule=zero-bubble")),
    ("multi", {}, ("dp=2,pp=2,zero=3", "dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,branch=2")),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "sets", "plans"), [*CASES, *(pytest.param(*case, marks=MATRIX) for case in MORE)])
def test_pieces_that_are_gathered_have_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    check(prove(launcher, name, plans, {"kind": kinds(name)[0], **sets}, MANY), f"{name} gathered", figures)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plant", [pytest.param(None, marks=MATRIX), f"{MANY},{NO_MEMORY}"])
def test_several_copies_of_cut_weights_go_with_the_other_axes(
    launcher: LocalLauncher, figures: Figures, plant: str | None
) -> None:
    """Uneven parts of three heads; gradients once a step, and after each microbatch."""
    sets = {"heads": "3", "width": "48", "kind": "adamw"}
    plans = ("dp_replicate=2,dp_shard=2,tp=2,microbatches=2", "dp_replicate=2,dp_shard=3,pp=2")
    check(prove(launcher, "gpt", plans[: 2 if plant is None else 1], sets, plant), "gpt copies", figures)


def test_gradients_that_pass_on_after_each_microbatch_are_those_of_one_device(
    launcher: LocalLauncher, figures: Figures
) -> None:
    plans = ("dp=2,pp=2,zero=3,microbatches=3,schedule=zero-bubble",)
    check(prove(launcher, "towers", plans, {"size": "15"}, f"{MANY},{NO_MEMORY}"), "towers passing", figures)


@pytest.mark.parametrize("axis", [pytest.param("tp=2", marks=MATRIX), "pp=2,microbatches=2"])
def test_what_is_trained_may_lie_on_the_host(launcher: LocalLauncher, figures: Figures, axis: str) -> None:
    plans = (f"dp=2,{axis},zero=3,offload=all",)
    check(prove(launcher, "gpt", plans, {}, f"{MANY},{CONDITION}host_apart"), "gpt offload", figures)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,pp=2,zero=3",
        *(pytest.param(plan, marks=MATRIX) for plan in ("dp=4,pp=2,zero=3", "dp=2,pp=2,zero=3,microbatches=2")),
    ],
)
def test_ranks_whose_losses_leave_out_other_outputs_gather_alike(launcher: LocalLauncher, plan: str) -> None:
    (report,) = verify(ROOT / "tests" / "tasks" / "choosing.py", [plan], {}, launcher=launcher, plant=MANY).plans
    assert report.status == "passed" and (report.grad_max_rel or 0) <= 1e-13, report


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=MATRIX)])
def test_in_a_lower_precision_the_copies_are_gathered(launcher: LocalLauncher, precision: str) -> None:
    """What is gathered are the rounded ones."""
    sets = {"precision": precision, "steps": "2", "norm": "group"}
    (report,) = prove(launcher, "cnn_skips", ("dp=2,pp=2,zero=3",), sets, MANY).plans
    assert report.status == "passed" and (report.grad_max_rel or 0) <= {"bf16": 3e-2, "fp16": 4e-3}[precision], report


def ranks(launcher: LocalLauncher, plan: str, **payload: Any) -> list[Any]:
    job = Job("gathered_entries:lent", {"plan": plan, **payload}, Plan.parse(plan).world_size, python_path=(HELPERS,))
    result = launcher.run(job)
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results, key=lambda name: int(name[1:]))]


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ("dp=2,tp=2,zero=3", 4),
        ("dp=2,pp=2,zero=3", 4),
        pytest.param("dp_replicate=2,dp_shard=2,pp=2", 4, marks=MATRIX),
    ],
)
def test_a_rank_keeps_its_share_and_has_a_piece_of_the_whole(launcher: LocalLauncher, plan: str, parts: int) -> None:
    """Stages aren't quite even, so what all ranks hold is added up."""
    found = ranks(launcher, plan, **LLAMA)
    whole, copies = found[0]["whole"], Plan.parse(plan).dp_replicate
    for at in range(3):
        held = sum(rank["rest"][at] for rank in found)
        assert held / len(found) == pytest.approx(whole / parts, rel=0.05) and held >= copies * whole
    for rank in found:
        assert len(set(rank["rest"])) == 1, "nothing that was gathered stays"
        assert 0 < rank["most"] < whole / 3, "but a stage, or all, is never whole"


def test_a_piece_is_gathered_once_forward_and_once_backward(launcher: LocalLauncher) -> None:
    """The last piece stays from its forward to its backward."""
    for rank in ranks(launcher, "dp=2,tp=2,zero=3", evaluates=True, **LLAMA):
        (pieces,) = rank["pieces"]
        assert pieces == rank["buckets"] >= 20, "each has one parameter, cut by rows or of one owner"
        assert rank["gathers"] == [2 * pieces - 1] * 2
        assert rank["evaluation"] and rank["evaluation"] % pieces == 0, "forward alone, of each batch"


def test_a_small_model_is_one_piece_and_the_way_is_said(launcher: LocalLauncher) -> None:
    for rank in ranks(launcher, "dp=2,tp=2,zero=3", small=False, **LLAMA):
        assert rank["pieces"] == [1]
        assert any("each gathers piece after piece of the traced graph instead" in note for note in rank["notes"])
