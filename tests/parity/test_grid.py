"""The grid of `make matrix`: every task under every plan with two optimizers has one device's numbers, or is refused.

A fixed sample of it runs in `make test`.
"""

from __future__ import annotations

import pytest

from parity import TASKS, Figures, check, kinds, prove
from stretto.launch import LocalLauncher

OTHERS = ("mlp_dropout", "t5", "vit", "cnn_skips", "towers")  # in test_axes_grid.py
NAMES = tuple(name for name, _, _ in TASKS if name not in OTHERS)
PLANS = (
    *("dp=2", "dp=3", "dp=4"),
    *("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3"),
    "dp_replicate=2,dp_shard=2",
    *("dp=1,microbatches=3", "dp=2,microbatches=3", "dp=2,zero=2,microbatches=3", "dp=2,zero=3,microbatches=3"),
)
# Every refusal there is, in its own words. Whatever else is refused, or is no longer, fails.
REFUSED: dict[str, dict[str, str]] = {
    "digits": {plan: "BatchNorm" for plan in PLANS if "microbatches" in plan},
}
# What FSDP2 cuts where workers can't share the weights' memory. Hybrid plans, which it always cuts, are in PLANS.
SEPARATE = "stretto.testing.conditions:separate_memory"
APART = tuple(plan for plan in PLANS if "zero=3" in plan)
AT_LEAST = 150  # cells that must be accepted
# (task, its optimizer: 0 or 1, plans): every task, every plan and both optimizers come; what is slow comes once.
SAMPLE = (
    ("gpt", 0, ("dp=3", "dp=3,zero=3")),
    ("gpt", 1, ("dp=2,zero=3",)),
    ("digits", 0, ("dp=2,zero=3", "dp=2,microbatches=3")),
    ("digits", 1, ("dp=4",)),
    ("ranking", 0, ("dp=2", "dp=2,zero=2", "dp=2,zero=3")),
    ("ranking", 1, ("dp=1,microbatches=3",)),
    ("lstm", 0, ("dp=2", "dp=2,zero=3,microbatches=3")),
    ("ignored_labels", 1, ("dp=4", "dp=3,zero=3", "dp_replicate=2,dp_shard=2")),
    ("llama", 0, ("dp=2,zero=3", "dp=2,zero=1")),
    ("bert", 0, ("dp=3", "dp=2,zero=2,microbatches=3")),
    ("bert", 1, ("dp=3,zero=3",)),
    ("multi", 0, ("dp=2,zero=3", "dp=2,zero=1")),
    ("multi", 1, ("dp=2,microbatches=3",)),
)
SAMPLE_APART = (
    ("gpt", 1, ("dp=2,zero=3",)),
    ("digits", 0, ("dp=2,zero=3",)),
    ("ranking", 0, ("dp=2,zero=3",)),
    ("lstm", 0, ("dp=2,zero=3,microbatches=3",)),
    ("bert", 1, ("dp=3,zero=3",)),
)


@pytest.mark.parametrize(("name", "kind", "plans"), SAMPLE, ids=lambda value: str(value))
def test_a_sample_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, kind: int, plans: tuple[str, ...]
) -> None:
    chosen = kinds(name)[kind]
    check(prove(launcher, name, plans, {"kind": chosen}), f"{name} {chosen}", figures, REFUSED.get(name))


@pytest.mark.parametrize(("name", "kind", "plans"), SAMPLE_APART, ids=lambda value: str(value))
def test_a_sample_has_the_numbers_of_one_device_where_no_memory_is_shared(
    launcher: LocalLauncher, figures: Figures, name: str, kind: int, plans: tuple[str, ...]
) -> None:
    chosen = kinds(name)[kind]
    check(prove(launcher, name, plans, {"kind": chosen}, SEPARATE), f"{name} {chosen} apart", figures)


def test_the_sample_and_the_grid_are_as_wide_as_they_say() -> None:
    assert {name for name, _, _ in SAMPLE} == set(NAMES)
    assert {plan for _, _, plans in SAMPLE for plan in plans} == set(PLANS)
    assert {kind for _, kind, _ in SAMPLE} == {0, 1}
    assert (len(NAMES), len(PLANS)) == (8, 12)
    expected = sum(plan not in REFUSED.get(name, {}) for name in NAMES for plan in PLANS for _ in kinds(name))
    assert expected >= AT_LEAST


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_grid_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, kind: int
) -> None:
    chosen = kinds(name)[kind]
    check(prove(launcher, name, PLANS, {"kind": chosen}), f"{name} {chosen}", figures, REFUSED.get(name))
    refused = {plan: why for plan, why in REFUSED.get(name, {}).items() if plan in APART}
    check(prove(launcher, name, APART, {"kind": chosen}, SEPARATE), f"{name} {chosen} apart", figures, refused)
