"""Models drawn at random, under plans drawn at random: the numbers of one device, or a refusal with its reason."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from stretto.launch import LocalLauncher
from stretto.verify import verify

TASK = Path(__file__).resolve().parents[1] / "tasks" / "random_parts.py"
CONDITIONS = ("no_free_memory", "separate_memory")
SAMPLE = (3, 12, 18, 29, 33, 47)
BATCHES_OF_SEEDS = 10


def plan_of(draw: Random) -> str:
    """Any stage, more ranks than rows or samples among them."""
    if draw.random() < 0.25:
        plan = draw.choice(["dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=3", "dp_replicate=3,dp_shard=2"])
    else:
        zero = draw.choice([0, 1, 2, 3])
        plan = f"dp={draw.choice([2, 3, 5])}" + (f",zero={zero}" if zero else "")
    pieces = draw.choice([1, 1, 2, 4])
    return plan if pieces == 1 else f"{plan},microbatches={pieces}"


def prove(launcher: LocalLauncher, seed: int, num_plans: int) -> None:
    draw = Random(seed)
    plans = [plan_of(draw) for _ in range(num_plans)]
    plant = ",".join(f"stretto.testing.conditions:{name}" for name in CONDITIONS if draw.random() < 0.4)
    precision, steps, bound = draw.choice([("fp64", 4, 1e-12)] * 3 + [("bf16", 1, 1e-5)])
    sets = {"seed": str(seed), "precision": precision}
    for report in verify(TASK, plans, sets, steps=steps, launcher=launcher, plant=plant).plans:
        where = f"--set seed={seed} --set precision={precision} --plan {report.plan} ({plant}): {report.reason}"
        assert report.status == "passed", where
        off = max(report.grad_max_rel or 0, report.weight_max_rel or 0, report.state_max_rel or 0)
        assert off <= bound and report.steps == steps, f"{where} {off}"


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_random_models_has_the_numbers_of_one_device(launcher: LocalLauncher, seed: int) -> None:
    prove(launcher, seed, 1)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tens", range(BATCHES_OF_SEEDS))
def test_many_random_models_have_the_numbers_of_one_device(launcher: LocalLauncher, tens: int) -> None:
    failures = []
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        try:
            prove(launcher, seed, 3)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)
