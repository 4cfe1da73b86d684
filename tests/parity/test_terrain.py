"""Hard parameters, hard losses, whole-tensor optimizers and low precision: exact under every plan, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import LocalLauncher
from stretto.verify import PlanReport, verify

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"
NO_MEMORY = "stretto.testing.conditions:no_free_memory"
MATRIX = pytest.mark.matrix  # what a sample in `make test` leaves to `make matrix`
SEPARATE = "stretto.testing.conditions:separate_memory"
# Each way in which gradients travel: whole, dealt, passing on, sharded, in several copies; once a step and more often.
PLANS = (
    "dp=2",
    "dp=3,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=2,microbatches=2",
    "dp=2,zero=3,microbatches=3",
    "dp_replicate=2,dp_shard=2",
)
FIGURES = ("loss_max_rel", "grad_max_rel", "grad_norm_max_rel", "weight_max_rel", "state_max_rel")


def proved(
    launcher: LocalLauncher, task: str, plans: tuple[str, ...], sets: dict[str, str], plant: str | None = None
) -> list[PlanReport]:
    return list(verify(TASKS / task, plans, sets, launcher=launcher, plant=plant).plans)


def everywhere(launcher: LocalLauncher, task: str, sets: dict[str, str]) -> list[PlanReport]:
    """Under all of ``PLANS``, and where workers can't share the weights' memory."""
    apart = proved(launcher, task, ("dp=2,zero=3,microbatches=3",), sets, SEPARATE)
    return [*proved(launcher, task, PLANS, sets), *apart]


def exact(reports: list[PlanReport]) -> None:
    for report in reports:
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        assert all(getattr(report, figure) <= 1e-13 for figure in FIGURES), report


@pytest.mark.parametrize("kind", ["adagrad", "sgd"])
def test_sparse_complex_empty_frozen_and_shared_parameters_are_exact_dp09_dp11_pc02_sh06_sh08_sh10_sh14(
    launcher: LocalLauncher, kind: str
) -> None:
    exact(everywhere(launcher, "hard_parts.py", {"kind": kind}))


def test_each_term_of_a_loss_is_divided_by_its_own_global_weight_ls01(launcher: LocalLauncher) -> None:
    """Batches of 3: ranks, microbatches and whole batches without weight for one term, and ghosts."""
    exact(everywhere(launcher, "terms.py", {"batch": "3"}))


@pytest.mark.parametrize("sizes", [("5", "2"), ("4", "1")])
def test_short_last_batches_and_batches_without_a_label_are_those_of_one_device_ls01(
    launcher: LocalLauncher, sizes: tuple[str, str]
) -> None:
    """Positions with a label differ from sample to sample, and samples 1 and 4 have none: in batches of one, those
    are steps without weight."""
    size, batch = sizes
    exact(everywhere(launcher, "ignored_labels.py", {"size": size, "batch": batch}))


@pytest.mark.parametrize("kind", ["muon", "adafactor", "lamb"])
def test_an_optimizer_of_whole_tensors_is_exact_with_one_owner_a_tensor_and_refused_where_there_is_none(
    launcher: LocalLauncher, kind: str
) -> None:
    plans = ("dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3")
    *dealt, sharded = proved(launcher, "whole_tensors.py", plans, {"kind": kind})
    exact(dealt)
    assert sharded.status == "refused" and "looks at whole tensors" in str(sharded.reason)


@pytest.mark.parametrize("kind", ["muon", "lamb"])
def test_an_optimizer_of_whole_tensors_is_refused_where_tp_cuts_them(launcher: LocalLauncher, kind: str) -> None:
    (report,) = proved(launcher, "whole_tensors.py", ("tp=2",), {"kind": kind})
    assert report.status == "refused" and "so tp=2, which cuts them, would change" in str(report.reason)


@pytest.mark.parametrize("task", ["hard_parts.py", "terms.py"])
def test_gradients_that_are_sent_after_each_microbatch_add_up_to_the_same(launcher: LocalLauncher, task: str) -> None:
    plans = ("dp=2,zero=2,microbatches=3", "dp=2,zero=3,microbatches=2", "dp_replicate=2,dp_shard=2,microbatches=2")
    exact(proved(launcher, task, plans, {}, plant=NO_MEMORY))
    exact(proved(launcher, task, ("dp=2,zero=3,microbatches=2",), {}, plant=f"{NO_MEMORY},{SEPARATE}"))


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=3,zero=3", "dp=2,zero=3,microbatches=3"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_rank_far_behind_the_others_reads_and_leaves_what_it_should(
    launcher: LocalLauncher, plan: str, precision: str
) -> None:
    """Where ranks share one copy of the weights, nothing but waiting keeps one's update from another's reading."""
    sets = {"precision": precision, "steps": "4" if precision == "fp64" else "1"}
    (report,) = proved(launcher, "lstm.py", (plan,), sets, "stretto.testing.conditions:slow_rank")
    assert report.status == "passed", f"{report.plan}: {report.reason}"
    assert report.weight_max_rel is not None and report.weight_max_rel <= (1e-13 if precision == "fp64" else 2e-6)


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        *(("hard_parts.py", "bf16"), ("hard_parts.py", "fp16"), ("lstm.py", "bf16-autocast")),
        *(pytest.param("lstm.py", precision, marks=MATRIX) for precision in ("bf16", "fp16")),
        pytest.param("hard_parts.py", "bf16-autocast", marks=MATRIX),
    ],
)
def test_a_low_precision_means_the_same_at_every_stage(launcher: LocalLauncher, precision: str, task: str) -> None:
    """Float32 masters, float32 sums: beside the rounding of sums nothing differs, so one step agrees to 1e-6, which
    copies that were added up in bfloat16 (2e-3) or a cast at another place would not."""
    for report in everywhere(launcher, task, {"precision": precision, "steps": "1"}):
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        assert all(getattr(report, figure) <= 2e-6 for figure in FIGURES), report
        assert report.weight_max_rel or report.grad_max_rel, "float32 sums in another order are not equal to the bit"


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=MATRIX) for p in ("fp16", "bf16-autocast"))])
def test_a_batch_norm_in_low_precision_is_within_its_wide_bounds_dp15(launcher: LocalLauncher, precision: str) -> None:
    plans = ("dp=1", "dp=3,zero=1", "dp=2,zero=3")
    for report in proved(
        launcher, "../../examples/digits", plans, {"precision": precision, "batch": "7", "steps": "3"}
    ):
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        assert report.loss_max_rel is not None and report.loss_max_rel <= 5e-3, report
