"""``pp``: a model in stages, cut from its traced graph; one device's numbers, or a refusal with its reason."""

from __future__ import annotations

import pytest

from parity import Figures, check, kinds, prove
from stretto.launch import LocalLauncher

# What is hard in stages, in CI; `make matrix` takes all tasks through more plans.
CASES = (
    # A tied table on the first and the last stage; fewer microbatches than stages; layers in chunks; split backwards.
    ("gpt", ("pp=2,microbatches=3", "pp=3,schedule=gpipe")),
    ("gpt", ("pp=2,schedule=interleaved,microbatches=2", "pp=2,tp=2")),
    ("gpt", ("dp=2,pp=2,zero=1,microbatches=3,schedule=zero-bubble", "dp=2,tp=2,zero=3")),
    ("digits", ("pp=2", "dp=2,pp=2,zero=1")),  # BatchNorm, whose statistics a stage takes of all workers' samples
    ("ranking", ("pp=2,microbatches=2",)),  # two towers and sparse tables
    ("mlp_dropout", ("pp=3,microbatches=2",)),  # random numbers go on where the stage before left off
    ("multi", ("pp=2,microbatches=2",)),  # several inputs and outputs, a module that is used twice
)


@pytest.mark.parametrize(("name", "plans"), CASES)
def test_a_model_in_stages_has_the_numbers_of_one_device_pp02_pp10(
    launcher: LocalLauncher, figures: Figures, name: str, plans: tuple[str, ...]
) -> None:
    kind = kinds(name)[0]
    check(prove(launcher, name, plans, {"kind": kind} if name != "mlp_dropout" else {}), f"{name} {kind}", figures)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_microbatches_without_a_sample_count_for_nothing(
    launcher: LocalLauncher, figures: Figures, schedule: str
) -> None:
    """The third batch has one sample for three microbatches."""
    check(prove(launcher, "towers", (f"pp=2,microbatches=3,schedule={schedule}",), {"size": "15"}), "towers", figures)


@pytest.mark.parametrize(
    ("name", "plan", "says"),
    [
        ("gpt", "pp=2,precision=bf16", "embedding.weight is used by several stages"),
        ("digits", "dp=2,pp=2,microbatches=2", "is a BatchNorm, whose statistics are of the whole batch"),
        ("multi", "pp=2,chunks=99", "the model can be cut into"),
    ],
)
def test_what_pp_can_t_do_is_refused_with_the_reason_pp10(
    launcher: LocalLauncher, name: str, plan: str, says: str
) -> None:
    plan, _, precision = plan.partition(",precision=")
    (report,) = prove(launcher, name, (plan,), {"precision": precision or "fp64"}).plans
    assert report.status == "refused" and says in str(report.reason), report
