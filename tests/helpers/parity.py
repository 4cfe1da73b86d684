"""The tasks, plans and bounds by which the law of the house is measured, and the table that tells of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from stretto.launch import LocalLauncher
from stretto.verify import VerifyReport, verify

ROOT = Path(__file__).resolve().parents[2]
BAR_GRADIENT, BAR_WEIGHT = 1e-13, 1e-12
FIGURES = ("loss_max_rel", "grad_max_rel", "grad_norm_max_rel", "weight_max_rel", "state_max_rel")
# Batches of 7 everywhere: on two, three or four ranks, and in microbatches, the shares are uneven.
TINY_GPT = {"depth": "2", "width": "32", "context": "16", "heads": "2", "batch": "7", "steps": "5"}
TASKS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gpt", "examples/gpt", TINY_GPT),
    ("digits", "examples/digits", {"batch": "7", "steps": "5"}),
    ("ranking", "examples/ranking", {"batch": "7", "steps": "5"}),
    ("lstm", "tests/tasks/lstm.py", {}),
    ("ignored_labels", "tests/tasks/ignored_labels.py", {}),
    ("llama", "tests/tasks/llama.py", {}),
    ("bert", "tests/tasks/bert.py", {}),
    ("multi", "tests/tasks/multi.py", {}),
    ("t5", "tests/tasks/t5.py", {}),
    ("vit", "tests/tasks/vit.py", {}),
    ("cnn_skips", "tests/tasks/cnn_skips.py", {}),
    ("towers", "tests/tasks/towers.py", {}),
    ("mlp_dropout", "tests/tasks/mlp_dropout.py", {}),  # not in the grid: it draws random numbers
)


def kinds(name: str) -> tuple[str, str]:
    """The two optimizers of a task; those of sparse gradients are others."""
    return ("adagrad", "sgd") if name == "ranking" else ("adamw", "sgd")


@dataclass
class Figures:
    """What all reports of a session said: rows to print, and each plan's status counted."""

    rows: list[str] = field(default_factory=list)
    refused: dict[tuple[str, str, str], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, report: VerifyReport, who: str) -> None:
        """Adds a row for each plan."""
        for plan in report.plans:
            self.counts[plan.status] += 1
            if plan.status == "refused":
                self.rows.append(f"{who:<24}{plan.plan:<32}  refused: {plan.reason}")
                continue
            numbers = [getattr(plan, name) for name in FIGURES]
            cells = "".join(f"{'-' if number is None else format(number, '.1e'):>11}" for number in numbers)
            self.rows.append(f"{who:<24}{plan.plan:<32}{cells}{sum(plan.left_out.values()):>11}")

    def table(self) -> str:
        """All rows under their heads; what was refused, with its reason, after what was not."""
        heads = "".join(f"{name.removesuffix('_max_rel'):>11}" for name in FIGURES)
        lines = sorted(self.rows, key=lambda row: "refused: " in row)
        told = ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items()))
        return "\n".join([f"{'task':<24}{'plan':<32}{heads}   left out", *lines, told])


def prove(
    launcher: LocalLauncher, name: str, plans: tuple[str, ...], sets: dict[str, str], plant: str | None = None
) -> VerifyReport:
    """One of the tasks, in its small size, under each plan."""
    _, path, own = next(task for task in TASKS if task[0] == name)
    return verify(ROOT / path, plans, {**own, **sets}, launcher=launcher, plant=plant)


def check(report: VerifyReport, who: str, figures: Figures, refusals: dict[str, str] | None = None) -> None:
    """Every plan has one device's numbers, but those in ``refusals``, which are refused in these words."""
    figures.note(report, who)
    expected = refusals or {}
    for plan in report.plans:
        if plan.plan in expected:
            assert plan.status == "refused", f"{who} {plan.plan}: {plan.status}, where it was to be refused"
            assert expected[plan.plan] in (plan.reason or ""), f"{who} {plan.plan}: {plan.reason}"
            continue
        assert plan.status == "passed", f"{who} {plan.plan}: {plan.reason}"
        assert plan.steps == 5
        assert all(getattr(plan, name) <= BAR_GRADIENT for name in FIGURES[:3]), plan
        assert all(getattr(plan, name) <= BAR_WEIGHT for name in FIGURES[3:]), plan
    assert report.passed and report.dtype == "float64"
