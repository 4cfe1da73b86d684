"""``branch``: towers of a model on different ranks; one device's numbers, or a refusal with its reason."""

from __future__ import annotations

import pytest

from parity import BAR_GRADIENT, FIGURES, ROOT
from stretto.launch import LocalLauncher
from stretto.verify import verify

EVEN = "stretto.testing.conditions:even_stages"
MATRIX = pytest.mark.matrix
MANY = (
    *("branch=2", "branch=2,microbatches=3,schedule=zero-bubble", "branch=2,microbatches=3,schedule=interleaved"),
    *("dp=2,branch=2,zero=2", "dp=2,branch=2,zero=2,microbatches=2", "dp=2,branch=2,zero=3"),
    *("tp=2,branch=2", "dp=2,tp=2,branch=2"),
)
STAGES = (
    *("branch=2,pp=2", "branch=2,pp=2,schedule=gpipe,microbatches=3", "branch=2,pp=3,microbatches=2,recompute=full"),
    *("branch=2,pp=2,schedule=zero-bubble,microbatches=3", "branch=2,pp=2,schedule=interleaved,microbatches=4"),
    *("dp=2,branch=2,pp=2,zero=1", "dp=2,branch=2,pp=2,zero=2,microbatches=2", "dp=2,branch=2,pp=2,zero=3"),
    "tp=2,branch=2,pp=2,schedule=zero-bubble,microbatches=2",
)


@pytest.mark.parametrize(
    ("task", "sets", "plans"),
    [
        ("towers", {}, ("branch=2,microbatches=3,schedule=zero-bubble", "dp=2,branch=2,zero=2", "tp=2,branch=2")),
        ("branches", {"kind": "stem"}, ("branch=3,microbatches=2", "dp=2,branch=2,zero=3")),
        ("branches", {"kind": "siamese"}, ("branch=2", "dp=2,branch=2,zero=2,microbatches=2")),
        ("branches", {"kind": "siamese", "rate": "0.3"}, ("branch=2,microbatches=2,schedule=zero-bubble",)),
        *(
            pytest.param("branches", {"kind": kind, "rate": rate}, (f"branch=2,microbatches=2{more}",), marks=MATRIX)
            for kind, rate, more in (("siamese", "0.2", ",recompute=full"), ("stem", "0.3", ""))
        ),
        ("towers", {}, ("branch=2,pp=2,schedule=zero-bubble,microbatches=3",)),
        pytest.param("towers", {}, ("tp=2,branch=2,pp=2,microbatches=2",), marks=MATRIX),
        pytest.param("branches", {"kind": "stem"}, ("dp=2,branch=2,pp=2,zero=2,microbatches=2",), marks=MATRIX),
        ("branches", {"kind": "stem"}, ("branch=2,pp=2,microbatches=2",)),
        ("branches", {"kind": "siamese", "rate": "0.3"}, ("branch=2,pp=2,microbatches=2,recompute=full",)),
        *(pytest.param("towers", {"kind": kind}, STAGES, marks=MATRIX) for kind in ("adamw", "sgd")),
        *(
            pytest.param("branches", {"kind": kind, "rate": rate}, STAGES[: 9 if rate == "0" else 5], marks=MATRIX)
            for kind in ("stem", "siamese")
            for rate in ("0", "0.3")
        ),
        *(pytest.param("towers", {"kind": kind}, MANY, marks=MATRIX) for kind in ("adamw", "sgd")),
        *(
            pytest.param("branches", {"kind": kind, "optimizer": optimizer, "batch": "8"}, MANY, marks=MATRIX)
            for kind in ("stem", "siamese")
            for optimizer in ("adamw", "sgd")
        ),
        *(
            pytest.param("branches", {"kind": kind, "rate": "0.3"}, MANY[:3], marks=MATRIX)
            for kind in ("stem", "siamese")
        ),
    ],
)
def test_towers_on_different_ranks_have_the_numbers_of_one_device(
    launcher: LocalLauncher, task: str, sets: dict[str, str], plans: tuple[str, ...]
) -> None:
    report = verify(ROOT / f"tests/tasks/{task}.py", plans, sets, launcher=launcher, plant=EVEN)
    assert [plan.status for plan in report.plans] == ["passed"] * len(plans), report
    assert all(getattr(plan, name) <= 10 * BAR_GRADIENT for plan in report.plans for name in FIGURES), report


def test_towers_that_both_draw_are_told_to_wait_for_one_another(launcher: LocalLauncher) -> None:
    sets = {"kind": "siamese", "rate": "0.3"}
    found = verify(ROOT / "tests/tasks/branches.py", ["branch=2", "branch=2,pp=2"], sets, launcher=launcher, plant=EVEN)
    for plan in found.plans:
        assert plan.status == "passed"
        said = "both draw random numbers, so forward of the second waits for the first"
        assert str(plan.reason).count(said) == 1, "stages of one tower wait for one another anyway"


@pytest.mark.parametrize(
    ("task", "plan", "sets", "says"),
    [
        ("skips", "branch=2", {}, "everything depends on what comes before it; use pp=2"),
        ("towers", "branch=3", {}, "no more than 2 lie side by side (person 50%, thing 32% of the time); use branch=2"),
        ("branches", "branch=2", {"kind": "turns", "rate": "0.3"}, "one and other draw random numbers by turns, so"),
        ("skips", "branch=2,pp=2", {}, "finds no towers for 2 times 2 ranks: everything depends on what"),
        ("towers", "branch=2,pp=4,schedule=interleaved", {}, "thing can be cut into 7; use branch=2,pp=3"),
    ],
)
def test_what_branch_can_t_do_is_refused_with_the_reason(
    launcher: LocalLauncher, task: str, plan: str, sets: dict[str, str], says: str
) -> None:
    (report,) = verify(ROOT / f"tests/tasks/{task}.py", [plan], sets, launcher=launcher, plant=EVEN).plans
    assert report.status == "refused" and says in str(report.reason), report
