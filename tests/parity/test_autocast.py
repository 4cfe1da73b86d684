"""``bf16-autocast`` where a traced graph runs: the types that one device has, or a refusal with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity import FIGURES, ROOT, TASKS, TINY_GPT
from stretto.launch import Job, LocalLauncher
from stretto.verify import PlanReport, verify

EVEN = "stretto.testing.conditions:even_stages"
HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
MATRIX = pytest.mark.matrix
PATHS = {name: path for name, path, _ in TASKS} | {"branches": "tests/tasks/branches.py"}
UNET = {"norm": "group"}


def proved(launcher: LocalLauncher, name: str, plans: tuple[str, ...], sets: dict[str, str]) -> list[PlanReport]:
    own = {**(TINY_GPT if name == "gpt" else {}), "steps": "2", "precision": "bf16-autocast", **sets}
    return list(verify(ROOT / PATHS[name], plans, own, launcher=launcher, plant=EVEN).plans)


@pytest.mark.parametrize(
    ("name", "sets", "plans"),
    [
        # A table that the first stage looks up in float32 and the last one multiplies with in bfloat16.
        ("gpt", {}, ("pp=2",)),
        # An LSTM's bfloat16 goes to the next stage; weights whose gradients are put off, and a second forward.
        ("lstm", {}, ("pp=2,microbatches=2,schedule=zero-bubble,recompute=full",)),
        ("towers", {}, ("branch=2",)),
        pytest.param("cnn_skips", UNET, ("pp=2,microbatches=2,schedule=zero-bubble",), marks=MATRIX),
        pytest.param("vit", {}, ("pp=2", "dp=2,pp=2,zero=3"), marks=MATRIX),
        pytest.param("bert", {}, ("pp=2,recompute=selective", "dp=2,pp=2,zero=1,microbatches=2"), marks=MATRIX),
        pytest.param("multi", {}, ("pp=2,microbatches=2,schedule=zero-bubble",), marks=MATRIX),
        pytest.param("branches", {"kind": "stem"}, ("branch=3,microbatches=2",), marks=MATRIX),
        pytest.param("mlp_dropout", {}, ("pp=3,microbatches=2",), marks=MATRIX),
    ],
)
def test_where_nothing_is_cut_inside_it_rounds_as_one_device_does(
    launcher: LocalLauncher, name: str, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    for report in proved(launcher, name, plans, sets):
        assert report.status == "passed" and report.loss_max_rel == 0.0, report
        assert all(getattr(report, figure) <= 1e-6 for figure in FIGURES), report


@pytest.mark.parametrize(
    ("name", "sets", "plans"),
    [
        ("gpt", {}, ("tp=2",)),
        pytest.param("gpt", {}, ("dp=2,tp=2,pp=2",), marks=MATRIX),
        pytest.param("cnn_skips", UNET, ("tp=2",), marks=MATRIX),
        pytest.param("towers", {}, ("tp=2", "tp=2,branch=2"), marks=MATRIX),
        pytest.param("bert", {}, ("tp=2,sequence=true", "tp=2,recompute=selective"), marks=MATRIX),
        pytest.param("vit", {}, ("tp=2", "dp=2,tp=2,zero=3"), marks=MATRIX),
    ],
)
def test_cut_inside_it_rounds_parts_of_sums_and_no_more(
    launcher: LocalLauncher, name: str, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    for report in proved(launcher, name, plans, sets):
        assert report.status == "passed" and 0 < (report.loss_max_rel or 0) <= 1e-3, report
        assert (report.grad_max_rel or 0) <= 4e-2, report


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=MATRIX)])
def test_a_unet_that_tp_cuts_in_a_low_precision_is_rounded_once(launcher: LocalLauncher, precision: str) -> None:
    """Parts of a convolution's sum that were rounded for themselves would put ReLUs on their other sides."""
    (report,) = proved(launcher, "cnn_skips", ("tp=2",), {**UNET, "precision": precision, "steps": "1"})
    assert report.status == "passed" and (report.loss_max_rel or 0) <= 1e-3, report
    assert (report.grad_max_rel or 0) <= 4e-2, report


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(one, marks=MATRIX) for one in ("bf16-autocast", "fp16"))])
@pytest.mark.parametrize("name", ["cnn_skips", pytest.param("digits", marks=MATRIX)])
def test_batch_norms_in_stages_have_the_bits_of_the_models_own(
    launcher: LocalLauncher, name: str, precision: str
) -> None:
    whole, staged = proved(launcher, name, ("dp=1", "pp=2"), {"precision": precision, "batch": "7"})
    assert staged.status == "passed", staged
    assert [getattr(staged, figure) for figure in FIGURES] == [getattr(whole, figure) for figure in FIGURES]


@pytest.mark.parametrize(
    ("name", "plan", "sets", "who"),
    [
        ("branches", "branch=2", {"kind": "siamese"}, "encoder.0.weight"),
        pytest.param("multi", "pp=3", {}, "encoder.mix.weight", marks=MATRIX),
    ],
)
def test_a_layer_of_several_stages_is_refused_as_its_gradients_are_added_in_bfloat16(
    launcher: LocalLauncher, name: str, plan: str, sets: dict[str, str], who: str
) -> None:
    (report,) = proved(launcher, name, (plan,), sets)
    assert report.status == "refused" and f"{who} is used by several stages" in str(report.reason), report


def test_an_evaluation_is_one_devices(launcher: LocalLauncher) -> None:
    found = {}
    for workers, plan in ((1, "dp=1"), (2, "pp=2"), (2, "tp=2")):
        payload = {
            "task": str(ROOT / "tests" / "tasks" / "word_losses.py"),
            "plans": [plan],
            "sets": {"precision": "bf16-autocast", "batch": 6},
        }
        result = launcher.run(Job("evaluation_entries:totals", payload, workers, python_path=(HELPERS,)))
        assert result.failure is None, result.failure.text
        found[plan] = next(iter(result.results.values()))[0]
    assert found["pp=2"] == found["dp=1"]
    assert found["tp=2"]["loss"] == pytest.approx(found["dp=1"]["loss"], rel=1e-2)
