"""``sequence=true``: between cut layers each rank has its own places of the sequence; one device's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parity import BAR_GRADIENT, Figures, check, prove
from stretto.launch import Job, LocalLauncher
from stretto.verify import verify

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
PARTS = ROOT / "tests" / "tasks" / "sequence_parts.py"
GPT = {"depth": "1", "width": "32", "context": "16", "heads": "4", "batch": "4", "precision": "fp64"}
PLANS = ("tp=2,sequence=true", "tp=3,sequence=true,microbatches=2", "tp=2,sequence=true,pp=2")
WITH_SAMPLES = (
    "dp=2,zero=1,tp=2,sequence=true",
    "dp=2,zero=3,tp=2,sequence=true,microbatches=2,recompute=selective",
)
NO_PLACES = "sequence=true is inactive: no sum of a cut layer has a dimension beside the batch and the features"


def run(launcher: LocalLauncher, entry: str, **payload: Any) -> list[Any]:
    result = launcher.run(Job(f"tensor_entries:{entry}", payload, 2, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results)]


@pytest.mark.parametrize(
    ("name", "sets", "plans"),
    [
        ("gpt", {"dropout": "0.2"}, (PLANS[0], PLANS[2])),
        pytest.param("gpt", {"dropout": "0.2", "kind": "sgd"}, (WITH_SAMPLES[1],), marks=pytest.mark.matrix),
        pytest.param("llama", {"kind": "sgd"}, (PLANS[1],), marks=pytest.mark.matrix),
        pytest.param("gpt", {"dropout": "0.2"}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
        pytest.param("llama", {}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
        pytest.param("bert", {}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
        pytest.param("t5", {}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
        pytest.param("vit", {}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
    ],
)
def test_a_model_cut_along_the_sequence_has_the_numbers_of_one_device_tp07(
    launcher: LocalLauncher, figures: Figures, name: str, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    """Sequences of 16 and 10 on three ranks are uneven; dropout draws for all places what one device would."""
    check(prove(launcher, name, plans, sets), f"{name} {sets}", figures)


@pytest.mark.parametrize(
    ("sets", "plans"),
    [
        ({}, ("tp=2,sequence=true",)),
        ({"places": "true", "kind": "sgd"}, ("tp=5,sequence=true",)),
        pytest.param({}, (*PLANS, *WITH_SAMPLES), marks=pytest.mark.matrix),
        pytest.param({"places": "true", "kinds": "after-level-own-turned-changed"}, PLANS, marks=pytest.mark.matrix),
    ],
)
def test_whatever_stands_between_cut_layers_keeps_its_numbers(
    launcher: LocalLauncher, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    """Other layouts, what looks at all places, at their neighbours, changes in place; five places on two ranks."""
    for plan in verify(PARTS, plans, sets, launcher=launcher).plans:
        assert plan.status == "passed" and "inactive" not in str(plan.reason), plan
        assert max(plan.loss_max_rel or 0, plan.grad_max_rel or 0) <= BAR_GRADIENT, plan


@pytest.mark.parametrize(
    ("name", "sets", "plan", "says"),
    [
        ("mlp_dropout", {}, "tp=2,sequence=true", NO_PLACES),
        ("gpt", {"context": "2"}, "tp=3,sequence=true", "its sequence of 2 is shorter than tp=3"),
    ],
)
def test_where_there_is_no_sequence_it_is_inactive_and_says_so(
    launcher: LocalLauncher, name: str, sets: dict[str, str], plan: str, says: str
) -> None:
    (found,) = prove(launcher, name, (plan,), sets).plans
    assert found.status == "passed" and says in str(found.reason), found


def test_all_reduces_become_reduce_scatters_and_all_gathers_of_the_same_size(launcher: LocalLauncher) -> None:
    """Beside them in backward: the positions' gradients, gathered, and those of what every rank adds to its places."""
    activation, tokens, scatter, gather = 4 * 16 * 32, 4 * 16, "reduce_scatter", "gather_parts"
    for depth in (1, 2):
        sets, layers = {**GPT, "depth": str(depth)}, 2 * depth + 1
        for found in run(launcher, "messages", task=str(ROOT / "examples/gpt"), plan="tp=2,sequence=true", sets=sets):
            forward, backward = len(found["forward"]), len(found["backward"])
            assert found["forward"] == [*[activation] * 2 * layers, 2 * tokens], "the table, the blocks, the loss"
            assert found["kinds"][:forward] == [*[scatter, gather] * layers, "all_gather"]
            told = list(zip(found["backward"], found["kinds"][forward:], strict=False))
            large = [kind for size, kind in told if size == activation]
            assert large == [scatter, gather] * layers, "the same way back"
            small = [(size, kind) for size, kind in told if size != activation]
            weights = 2 * layers + 2 * depth + 3 * 2 * depth  # of norms, biases of sums, taps of the convolutions
            assert sorted(small) == [*[(32, "all_reduce")] * weights, (16 * 32, gather)]
            assert len(told) == backward
            assert found["evaluation"] == [*[activation] * 2 * layers, found["logits"]]


def test_forward_keeps_less_for_backward(launcher: LocalLauncher) -> None:
    """What cut layers keep, of their parts and of the whole that they are given, is the same; the rest is halved."""
    sets = {"kinds": "own-root-flat", "length": "64"}
    plain, cut = (run(launcher, "kept", task=str(PARTS), plan=plan, sets=sets) for plan in ("tp=2", PLANS[0]))
    for before, after in zip(plain, cut, strict=True):
        assert after < 0.8 * before, (before, after)
