"""The grid of ``tp``, ``pp`` and ``branch`` with all else: kinds of models under plans of up to eight workers have one
device's numbers, or are refused with a reason that is listed here. A fixed sample runs in `make test`, all by
`make matrix`.
"""

from __future__ import annotations

import pytest

from parity import Figures, check, kinds, prove
from stretto.launch import LocalLauncher

# (kind, task, settings)
KINDS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gpt, tied", "gpt", {}),
    ("llama, shared keys", "llama", {}),
    ("bert", "bert", {}),
    ("t5, tied", "t5", {}),
    ("vit", "vit", {}),
    ("u-net, batch norm", "cnn_skips", {"size": "17"}),  # a batch of three: on four workers a ghost
    ("u-net, group norm", "cnn_skips", {"norm": "group"}),
    ("lstm", "lstm", {}),
    ("towers", "towers", {}),
    ("multi, shared", "multi", {}),
)
PLANS = (
    *("dp=3", "dp=1,microbatches=3", "dp=2,zero=1,microbatches=2", "dp=2,zero=2", "dp=3,zero=3"),
    *("dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2,pp=2,microbatches=2"),
    *("tp=2", "tp=3", "tp=2,microbatches=2", "dp=2,tp=2"),
    *("tp=2,sequence=true", "dp=2,tp=3,sequence=true,zero=1", "tp=2,sequence=true,pp=2,microbatches=2"),
    *("dp=2,tp=2,zero=1", "dp=3,tp=2,zero=2,microbatches=2", "dp=2,tp=2,zero=3"),
    *("pp=2", "pp=3,microbatches=3", "pp=2,schedule=gpipe,microbatches=2", "pp=4,schedule=gpipe,microbatches=4"),
    *("pp=2,schedule=interleaved,microbatches=2", "pp=2,schedule=interleaved,chunks=3,microbatches=4"),
    "pp=3,schedule=zero-bubble,microbatches=4",
    *("dp=2,pp=2,microbatches=2", "dp=2,pp=2,zero=2,microbatches=2", "dp=2,pp=2,zero=3", "dp=4,pp=2,zero=3"),
    *("tp=2,pp=2,microbatches=2", "tp=2,pp=2,schedule=zero-bubble,microbatches=3"),
    *("dp=2,tp=2,pp=2,zero=1,schedule=interleaved", "dp=2,tp=2,pp=2,zero=3,microbatches=2"),
    *("branch=2", "branch=2,schedule=zero-bubble,microbatches=3", "dp=2,branch=2,zero=2", "dp=2,tp=2,branch=2,zero=3"),
    *("branch=2,pp=2,microbatches=3", "tp=2,branch=2,pp=2,schedule=zero-bubble,microbatches=2"),
    *("dp=2,branch=2,pp=2,zero=2,recompute=full", "branch=2,pp=2,schedule=interleaved,microbatches=4"),
    *("tp=2,pp=2,microbatches=2,recompute=full", "dp=2,tp=2,pp=2,zero=1,microbatches=4,recompute=selective"),
)
EVEN = "stretto.testing.conditions:even_stages"  # so that what is found side by side doesn't hang on a clock


def _batch_norm(plan: str) -> str:
    return "is a BatchNorm, whose statistics are of the whole batch" if "microbatches" in plan else _no_towers(plan)


def _no_towers(plan: str) -> str:
    return "finds no towers" if "branch" in plan else ""


def _small_towers(plan: str) -> str:
    """Its towers are 10 % of the operations where the loss isn't traced, and 9.8 % where it is, as with tp."""
    return "would save 9.8%, which is less than 10%" if "branch" in plan and "tp=" in plan else ""


def _one_operation(plan: str) -> str:
    """All its layers are one operation, between an embedding and a head."""
    many = "interleaved" in plan or "pp=4" in plan
    return _no_towers(plan) or ("the model can be cut into 3" if many else "")


# Every refusal there is. Whatever else is refused, or is no longer, fails.
REFUSED = {
    "u-net, batch norm": _batch_norm,
    "u-net, group norm": _no_towers,
    "lstm": _one_operation,
    "vit": _small_towers,
}
AT_LEAST = 150  # pairs of a kind and a plan that must be accepted
# (kind, its optimizer: 0 or 1, plans) for CI, beside test_pipeline.py and test_tensor.py
SAMPLE = (
    ("t5, tied", 0, ("pp=2",)),
    ("vit", 1, ("tp=2,microbatches=2",)),
    # Three ranks have 2, 1 and 1 of 4 channels, or of 4 groups.
    ("u-net, batch norm", 0, ("tp=3",)),
    ("u-net, group norm", 1, ("pp=3,schedule=zero-bubble,microbatches=4", "tp=3")),
    ("lstm", 0, ("pp=2,schedule=gpipe,microbatches=2", "tp=2")),
    ("gpt, tied", 0, ("tp=2,pp=2,microbatches=2",)),
    ("towers", 1, ("dp=2,tp=2,pp=2,zero=3,microbatches=2",)),
    ("multi, shared", 0, ("branch=2,schedule=zero-bubble,microbatches=3", "dp=2,branch=2,zero=2")),
    ("gpt, tied", 0, ("dp=2,tp=2,pp=2,zero=1,microbatches=4,recompute=selective",)),
)


def refusals(kind: str, plans: tuple[str, ...]) -> dict[str, str]:
    why = REFUSED.get(kind, lambda plan: "")
    return {plan: said for plan in plans if (said := why(plan))}


def prove_kind(launcher: LocalLauncher, figures: Figures, kind: str, optimizer: int, plans: tuple[str, ...]) -> None:
    name, sets = next((task, sets) for one, task, sets in KINDS if one == kind)
    chosen = kinds(name)[optimizer]
    for plant in (None, EVEN):
        some = tuple(plan for plan in plans if ("branch" in plan) == (plant is not None))
        if some:
            report = prove(launcher, name, some, {**sets, "kind": chosen}, plant)
            check(report, f"{kind} {chosen}", figures, refusals(kind, some))


@pytest.mark.parametrize(("kind", "optimizer", "plans"), SAMPLE, ids=lambda value: str(value))
def test_a_sample_of_the_axes_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, kind: str, optimizer: int, plans: tuple[str, ...]
) -> None:
    prove_kind(launcher, figures, kind, optimizer, plans)


def test_the_grid_of_axes_is_as_wide_as_it_says() -> None:
    assert (len({kind for kind, _, _ in KINDS}), len(set(PLANS))) == (10, 43)
    accepted = sum(plan not in refusals(kind, PLANS) for kind, _, _ in KINDS for plan in PLANS)
    assert accepted >= AT_LEAST
    assert {plan for _, _, plans in SAMPLE for plan in plans} <= set(PLANS)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_in_stages_rounds_as_one_device_does(
    launcher: LocalLauncher, precision: str, recompute: str
) -> None:
    """What a stage gets lies in memory as it did where it was made: of another layout a product rounds otherwise."""
    sets = {"precision": precision, "steps": "2"}
    plan = f"pp=2,schedule=zero-bubble,microbatches=2,recompute={recompute}"
    (report,) = prove(launcher, "lstm", (plan,), sets).plans
    assert report.status == "passed" and report.loss_max_rel == 0.0, report
    assert (report.grad_max_rel or 0) <= 1e-6 and (report.weight_max_rel or 0) <= 1e-6, report


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind, _, _ in KINDS])
def test_all_axes_have_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, kind: str, optimizer: int
) -> None:
    """Every other plan with one optimizer, the rest with the other."""
    prove_kind(launcher, figures, kind, optimizer, PLANS[optimizer::2])
