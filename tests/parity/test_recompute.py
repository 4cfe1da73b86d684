"""Whatever is computed again in backward, the numbers are those of one device that keeps everything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from parity import BAR_GRADIENT, BAR_WEIGHT, FIGURES, ROOT, Figures, check, kinds, prove
from stretto.launch import LocalLauncher
from stretto.verify import PlanReport, verify

HOW = ("selective", "full")
PLANS = ("dp=1", "dp=2", "dp=2,zero=3", "dp=2,zero=2,microbatches=2")
APART = ("dp=2,zero=3", "dp=2,zero=3,microbatches=2")  # where no memory is shared
SEPARATE = "stretto.testing.conditions:separate_memory"
PIECES = "stretto.testing.conditions:small_pieces"
HOST_APART = "stretto.testing.conditions:host_apart"
NAMES = ("gpt", "llama", "digits", "mlp_dropout", "lstm", "bert", "multi")
# (task, how, plans, plans apart): every task and every plan come, the rest in `make matrix`.
SAMPLE = (
    ("gpt", "selective", PLANS[:2], APART[:1]),
    ("gpt", "full", ("dp=2,zero=3",), APART),
    ("llama", "full", ("dp=2,zero=2,microbatches=2",), ("dp=2,zero=3",)),
    ("llama", "selective", ("dp=2",), ()),
    ("digits", "full", PLANS, ("dp=2,zero=3",)),
    ("digits", "selective", ("dp=2,zero=3",), ()),
    ("mlp_dropout", "full", ("dp=1", "dp=2"), ("dp=2,zero=3,microbatches=2",)),
    ("lstm", "selective", ("dp=2",), ("dp=2,zero=3",)),
)
# Stages of the traced graph.
STAGES = (
    *("pp=2,microbatches=3,schedule=gpipe", "pp=2,microbatches=3", "pp=2,microbatches=2,schedule=interleaved"),
    "pp=3,microbatches=4,schedule=zero-bubble",
)
AXES = ("tp=2", "tp=2,pp=2,microbatches=2", "tp=2,pp=2,microbatches=3,schedule=zero-bubble")
EIGHT = ("dp=2,tp=2,pp=2,zero=1,microbatches=4",)
# (task, settings, how, plans)
DIVIDED = (
    ("gpt", {}, "full", (AXES[0], STAGES[1])),
    pytest.param("gpt", {}, "selective", (AXES[1],), marks=pytest.mark.matrix),
    ("mlp_dropout", {}, "full", (AXES[2],)),
    ("mlp_dropout", {}, "selective", (AXES[0], STAGES[2])),
    ("cnn_skips", {"norm": "group"}, "full", (STAGES[0],)),
    ("cnn_skips", {"norm": "group"}, "selective", (STAGES[3],)),
    ("digits", {}, "full", ("pp=2",)),
    ("lstm", {}, "selective", ("pp=2",)),
    pytest.param("bert", {}, "full", AXES[1:2], marks=pytest.mark.matrix),
)
DIVIDED_WHOLE = (("gpt", {}), ("mlp_dropout", {}), ("bert", {}), ("cnn_skips", {"norm": "group"}))
MATRIX = pytest.mark.matrix  # what a sample in `make test` leaves to `make matrix`
SELECTIVE_IN_MATRIX = ("full", pytest.param("selective", marks=MATRIX))
SECOND = ROOT / "tests" / "tasks" / "second_forward.py"
HARD = ROOT / "tests" / "tasks" / "hard_parts.py"


def plans(of: tuple[str, ...], how: str) -> tuple[str, ...]:
    return tuple(f"{plan},recompute={how}" for plan in of)


def exact(reports: tuple[PlanReport, ...]) -> None:
    for report in reports:
        assert report.status == "passed", f"{report.plan}: {report.reason}"
        figures = [getattr(report, figure) for figure in FIGURES]
        assert max(figures[:3]) <= BAR_GRADIENT and max(figures[3:]) <= BAR_WEIGHT, report


@dataclass(frozen=True)
class Proof:
    """One task under plans that recompute; ``apart``: those where no memory is shared."""

    name: str
    how: str
    together: tuple[str, ...] = PLANS
    apart: tuple[str, ...] = APART


@pytest.mark.parametrize("proof", [Proof(*row) for row in SAMPLE], ids=lambda proof: f"{proof.name}-{proof.how}")
def test_a_sample_has_the_numbers_of_one_device(launcher: LocalLauncher, figures: Figures, proof: Proof) -> None:
    """gpt and llama have lists of layers, digits (BatchNorm) and mlp_dropout are Sequentials, lstm neither."""
    hold(launcher, figures, proof)


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_grid_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, how: str
) -> None:
    hold(launcher, figures, Proof(name, how))


def hold(launcher: LocalLauncher, figures: Figures, proof: Proof) -> None:
    name, how = proof.name, proof.how
    refused = {plan: "BatchNorm" for plan in plans((*PLANS, *APART), how) if name == "digits" and "micro" in plan}
    sets = {"kind": kinds(name)[HOW.index(how)]}
    reports = [prove(launcher, name, plans(proof.together, how), sets)]
    if proof.apart:
        reports.append(prove(launcher, name, plans(proof.apart, how), sets, SEPARATE))
    for report in reports:
        check(report, f"{name} {how}", figures, refused)
        inactive = [f"recompute={how} is inactive" in (plan.reason or "") for plan in report.plans]
        assert all(inactive) if name in ("lstm", "multi") else not any(inactive)


@pytest.mark.parametrize(("name", "sets", "how", "of"), DIVIDED)
def test_a_sample_of_stages_in_many_pieces_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, sets: dict[str, str], how: str, of: tuple[str, ...]
) -> None:
    check(prove(launcher, name, plans(of, how), sets, PIECES), f"{name} {how} in pieces", figures)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "sets"), DIVIDED_WHOLE)
def test_stages_in_many_pieces_have_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, name: str, sets: dict[str, str], how: str
) -> None:
    of = STAGES if name == "cnn_skips" else (*STAGES, *AXES, *EIGHT)  # a group norm's channels can't be cut
    check(prove(launcher, name, plans(of, how), sets, PIECES), f"{name} {how} in pieces", figures)


@pytest.mark.parametrize("how", SELECTIVE_IN_MATRIX)
@pytest.mark.parametrize("axes", [STAGES[3], pytest.param(AXES[1], marks=MATRIX)])
def test_pieces_of_stages_begin_with_what_has_waited_on_the_host(launcher: LocalLauncher, how: str, axes: str) -> None:
    sets = {"depth": "2", "width": "32", "context": "16", "heads": "2", "batch": "7", "steps": "3", "dropout": "0.3"}
    of = tuple(f"{plan},offload=all" for plan in plans((axes,), how))
    plant = f"{PIECES},{HOST_APART}"
    exact(verify(ROOT / "examples" / "gpt", of, sets, launcher=launcher, plant=plant).plans)


def test_a_graph_that_no_piece_would_save_memory_of_says_so(launcher: LocalLauncher) -> None:
    (plan,) = prove(launcher, "mlp_dropout", plans(("tp=2",), "full"), {}).plans
    assert plan.status == "passed" and "recompute=full is inactive: the model's traced graph" in (plan.reason or "")


@pytest.mark.parametrize("how", SELECTIVE_IN_MATRIX)
def test_dropout_in_attention_and_layers_is_drawn_once(launcher: LocalLauncher, how: str) -> None:
    sets = {"depth": "2", "width": "32", "context": "16", "heads": "2", "batch": "7", "steps": "5", "dropout": "0.3"}
    of = ("dp=2", "dp_replicate=2,dp_shard=2")
    exact(verify(ROOT / "examples" / "gpt", plans(of, how), sets, launcher=launcher).plans)


@pytest.mark.parametrize("how", SELECTIVE_IN_MATRIX)
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("draws", ("dp=1", "dp=2,zero=1", "dp=2,zero=3,microbatches=2")),
        ("norms", ("dp=1", "dp=3", "dp=2,zero=3")),
        ("attributes", ("dp=1",)),
    ],
)
def test_generators_statistics_and_attributes_are_those_of_the_first_forward(
    launcher: LocalLauncher, kind: str, of: tuple[str, ...], how: str
) -> None:
    exact(verify(SECOND, plans(of, how), {"kind": kind}, launcher=launcher).plans)
    sharded = tuple(plan for plan in of if "zero=3" in plan)
    exact(verify(SECOND, plans(sharded, how), {"kind": kind}, launcher=launcher, plant=SEPARATE).plans)


def test_a_rank_without_samples_enters_no_collective_twice(launcher: LocalLauncher) -> None:
    """Batches of three on four ranks: the ghost's layers are computed again as well."""
    of = plans(("dp=4", "dp=4,zero=3"), "full")
    exact(verify(SECOND, of, {"kind": "norm", "batch": "3"}, launcher=launcher).plans)


@pytest.mark.parametrize("how", HOW)
def test_sparse_complex_frozen_and_shared_parameters_stay_exact(launcher: LocalLauncher, how: str) -> None:
    of = ("dp=2", "dp=2,zero=2,microbatches=2", "dp_replicate=2,dp_shard=2")
    exact(verify(HARD, plans(of, how), {}, launcher=launcher).plans)


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=MATRIX) for p in ("fp16", "bf16-autocast"))])
def test_in_low_precision_one_step_is_that_of_keeping_everything(launcher: LocalLauncher, precision: str) -> None:
    sets = {"depth": "2", "width": "32", "context": "16", "heads": "2", "batch": "7", "steps": "1", "dropout": "0.3"}
    sets |= {"precision": precision}
    for how in HOW:
        for plant in (None, SEPARATE):
            of = plans(("dp=1", "dp=2,zero=3"), how)
            for report in verify(ROOT / "examples" / "gpt", of, sets, launcher=launcher, plant=plant).plans:
                assert report.status == "passed", f"{report.plan}: {report.reason}"
                assert all(getattr(report, figure) <= 2e-6 for figure in FIGURES), report


@pytest.mark.parametrize(
    ("kind", "how", "says"),
    [
        ("generator", "full", "layers.0 answers otherwise when it is computed a second time: does it draw from a"),
        ("cache", "selective", "layers.0 answers otherwise when it is computed a second time"),
        ("buffer", "full", "layers.0 changes a buffer in place in forward, and would do so a second time"),
        ("input", "full", "layers.0 was called with a tensor that is changed in place before backward"),
        ("later", "selective", "layers.2 was called with a tensor that is changed in place before backward"),
    ],
)
def test_what_can_t_be_computed_a_second_time_is_refused_by_name(
    launcher: LocalLauncher, kind: str, how: str, says: str
) -> None:
    report = verify(SECOND, [f"dp=1,recompute={how}", "dp=1"], {"kind": kind}, launcher=launcher)
    refused, kept = report.plans
    assert refused.status == "refused" and says in (refused.reason or ""), refused.reason
    assert kept.status == "passed", kept.reason


def test_results_that_are_changed_in_place_are_kept_as_they_were(launcher: LocalLauncher) -> None:
    exact(verify(SECOND, plans(("dp=2", "pp=2"), "selective"), {"kind": "product"}, launcher=launcher).plans)
