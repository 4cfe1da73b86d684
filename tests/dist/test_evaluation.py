"""Evaluation on real workers: exact under every plan, whatever a metric is made of; and the best checkpoint stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score  # type: ignore[import-untyped]

from stretto.checkpoint import open_checkpoint
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.preload import preloads
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
SCORED = str(ROOT / "tests" / "tasks" / "scored.py")
FOLLOWED = str(ROOT / "tests" / "tasks" / "followed.py")
WORDS = str(ROOT / "tests" / "tasks" / "word_losses.py")
BESIDES = str(ROOT / "tests" / "tasks" / "besides.py")
RANKING = str(ROOT / "examples" / "ranking")
PLANS = {
    1: ["dp=1", "dp=1,microbatches=3"],
    2: ["dp=2", "dp=2,zero=3", "pp=2", "tp=2"],
    3: ["dp=3", "dp=3,zero=3", "pp=3"],
    4: ["dp=2,pp=2", "dp=2,pp=2,zero=3", "dp=2,tp=2"],
}


def evaluated(launcher: LocalLauncher, workers: int, **payload: Any) -> JobResult:
    payload = {"task": SCORED, "plans": PLANS[workers], **payload}
    return launcher.run(Job("evaluation_entries:totals", payload, workers, python_path=(HELPERS,)))


def test_logits_in_parts_are_gathered_for_metrics(launcher: LocalLauncher) -> None:
    """13 words on three ranks, and nine samples of which three are left for the last batch."""
    sets = {"precision": "fp64", "batch": 6, "tied": True}
    found = []
    for workers, plan in ((1, "dp=1"), (3, "tp=3")):
        result = evaluated(launcher, workers, task=WORDS, plans=[plan], sets=sets)
        assert result.failure is None, result.failure.text
        found += [rank[0] for rank in result.results.values()]
    whole, *others = found
    assert len(others) == 3 and len(whole["first"]) == 9 and len(whole["first"][0]) == 13
    for rank in others:
        assert rank["accuracy"] == whole["accuracy"] and rank["loss"] == pytest.approx(whole["loss"], rel=1e-13)
        assert torch.tensor(rank["first"]).sub(torch.tensor(whole["first"])).abs().max() < 1e-13


@pytest.mark.parametrize("workers", [1, 2, 3, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 10), (7, 7), (7, 2)])
def test_metrics_are_those_of_the_whole_split_da09_da11_pp06(
    launcher: LocalLauncher, workers: int, size: int, batch: int
) -> None:
    """10 samples in batches of 4: the last one holds 2, so that the third rank runs a ghost. 7 on two ranks: 4 and 3."""
    task = load_task(SCORED, {"held_out": size})
    x, y, number = (torch.stack(column) for column in zip(*task.data()["val"], strict=True))
    result = evaluated(launcher, workers, sets={"batch": batch, "held_out": size})
    assert result.failure is None, result.failure.text
    for found in (plan for rank in result.results.values() for plan in rank):
        score = torch.tensor(found["score"], dtype=torch.float64)
        assert score.shape == (size,)
        guess = (score > 0).long()
        assert found["accuracy"][0] / found["accuracy"][1] == accuracy_score(y, guess)
        assert roc_auc_score(found["y"], score) == roc_auc_score(y, score)
        (_, false), (missed, hit) = found["confusion"][0]
        assert 2 * hit / (2 * hit + false + missed) == pytest.approx(f1_score(y, guess), abs=1e-15)
        assert found["confusion"][1] == found["index"][1] == size
        assert found["index"][0] / found["index"][1] == (size - 1) / 2
        assert found["of integers"] == [size, size]
        assert found["y"] == y.tolist(), "rows stand in the dataset's order"
        assert found["id"] == [2**60 + 3 + int(each) for each in number], "and whole numbers stay exact"
        assert found["both"] == torch.stack([score, -score], 1).tolist()
        target = y.double()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, target, reduction="sum")
        assert found["loss"] == pytest.approx([float(loss), size], rel=1e-15)
        with torch.no_grad():
            alone = one_device(task, x)
        assert score.tolist() == pytest.approx(alone.tolist(), rel=1e-14)


def one_device(task: Any, x: torch.Tensor) -> torch.Tensor:
    """The scores of the model as it is built, in plain PyTorch."""
    from stretto.data import seed_everything

    seed_everything(task.recipe.seed)
    module = task.model().double().eval()
    found: torch.Tensor = module(x)
    return found


@pytest.mark.parametrize(
    ("how", "sets", "says"),
    [
        ("shape", {}, r"metrics()['confusion'] changes between batches: a pair of shapes [2, 2] and [], then"),
        (
            "shape",
            {"batch": 10},
            r"metrics()['confusion'] changes between batches: a pair of shapes [2, 2] and [], then",
        ),
        ("rows", {"batch": 10}, "metrics()['score'] has 4 rows for 5 samples; a metric of one tensor is kept row by"),
        ("missing", {"batch": 10}, "metrics()['score'] has rows for 5 of the split's 10 samples; return it for every"),
        ("scalar", {}, "metrics()['score'] returned one number; return the pair (sum, weight)"),
    ],
)
def test_a_metric_that_cannot_be_exact_is_one_line(
    launcher: LocalLauncher, how: str, sets: dict[str, Any], says: str
) -> None:
    failure = evaluated(launcher, 2, sets={"how": how, **sets}).failure
    assert failure is not None and failure.kind == "user", failure
    assert says in failure.text and "\n" not in failure.text.strip()


# ---------------------------------------------------------------------------------------- what stands beside


def test_baselines_are_asked_for_once_a_run_and_take_none_of_a_workers_memory(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    told: list[Any] = []
    asked, peaks = tmp_path / "asked", list[int]()
    for large in (1, 10**8):
        sets = {"task": BESIDES, "asked": str(asked), "large": large}
        summary = trained(launcher, tmp_path / f"of-{large}", tell=lambda _, event: told.append(event), **sets)
        peaks.append(summary["peak_bytes"])
    assert [event["baselines"] for event in told if event["kind"] == "evaluation"] == [{"nothing": 1.0}] * 3 + [
        {"nothing": 1e8}
    ] * 3
    assert len(asked.read_text().splitlines()) == 2
    assert peaks[1] < peaks[0] + 50e6, "of 400 MB"


def test_baselines_that_end_their_process_end_no_training(launcher: LocalLauncher, tmp_path: Path) -> None:
    told: list[Any] = []
    sets = {"task": BESIDES, "asked": str(tmp_path / "asked"), "dies": True}
    summary = trained(launcher, tmp_path / "run", tell=lambda _, event: told.append(event), **sets)
    assert summary["steps"] == 6
    assert [event["baselines"] for event in told if event["kind"] == "evaluation"] == [{}] * 3
    notes = [event["text"] for event in told if event["kind"] == "note"]
    assert [one for one in notes if "baselines() gave nothing to stand beside the metrics: its process was ended by SIGKILL" in one]


# ---------------------------------------------------------------------------------------- the best checkpoint


def train(
    launcher: LocalLauncher,
    run: Path,
    plan: str = "dp=2",
    attempt: int = 1,
    stop: int | None = None,
    task: str = FOLLOWED,
    tell: Callable[[str, dict[str, Any]], None] = lambda member, event: None,
    **sets: Any,
) -> JobResult:
    run.mkdir(exist_ok=True)
    order = TrainOrder(task, sets, plan, "test", str(run), attempt > 1, attempt, stop)
    workers = Plan.parse(plan).world_size
    job = Job(
        "stretto.training:work",
        order.to_payload(),
        workers,
        prepare="stretto.training:prepare",
        first_member=10 * attempt,
        attempt=attempt,
        log_dir=run / "logs",
    )
    return launcher.run(job, tell)


def trained(*arguments: Any, **more: Any) -> dict[str, Any]:
    result = train(*arguments, **more)
    assert result.failure is None, result.failure.text
    summary: dict[str, Any] = next(iter(result.results.values()))
    return summary


def kept(run: Path) -> list[int]:
    found = sorted((run / "checkpoints").iterdir())
    return [int(path.name.removeprefix("step-")) for path in found]


def best(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "best.json").read_text())
    return found


@pytest.mark.parametrize(
    ("rule", "values", "step", "more"),
    [
        ("highest score", [0, 1, 5, 3, float("nan"), 5, 4], 2, {"save_every": 1}),
        ("highest score", [0, 1, 5, 3, float("nan"), 5, 4], 2, {}),
        ("lowest score", [0, 7, 5, 3, -float("inf"), 5, 4], 3, {"save_every": 3}),
        ("highest score", [0, 1], 6, {"save_every": 3, "eval_every": 0}),  # known only when step 6 is saved already
        ("loss", [0, 1], 6, {"save_every": 1}),  # it falls all the time
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(
    launcher: LocalLauncher, tmp_path: Path, rule: str, values: list[float], step: int, more: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    summary = trained(launcher, run, best=rule, values=values, **more)
    order, metric = ("lowest loss" if rule == "loss" else rule).split()
    value = -6.0 if rule == "loss" else float(values[min(step, len(values) - 1)])
    path = f"checkpoints/step-{step:08d}"
    expected = {"step": step, "metric": metric, "order": order, "value": value, "path": path}
    assert best(run) == summary["best"] == expected
    assert json.loads((run / "summary.json").read_text())["best"] == expected
    assert kept(run) == sorted({step, 6}), "keep=1: the newest, and the best"
    assert all(open_checkpoint(run / "checkpoints" / f"step-{n:08d}").meta["best"] == expected for n in kept(run))


def test_a_resume_knows_the_best_so_far(launcher: LocalLauncher, tmp_path: Path) -> None:
    values = [0, 1, 5, 3, 4, 6, 2, 2]
    run, died = tmp_path / "run", tmp_path / "died"
    trained(launcher, run, stop=3, values=values, steps=7)
    assert kept(run) == [2, 3] and best(run)["step"] == 2
    shutil.copytree(run, died)
    (died / "best.json").unlink()  # as by a death between the checkpoint and the file
    trained(launcher, died, "dp=3,zero=3", attempt=2, stop=4, values=values, steps=7)
    assert kept(died) == [2, 4] and best(died) == best(run), "4 is not better than 5"
    summary = trained(launcher, died, "dp=1", attempt=3, values=values, steps=7)
    assert summary["best"]["step"] == best(died)["step"] == 5
    assert kept(died) == [5, 7], "a better one takes its place"


def test_a_metric_that_is_not_there_ends_the_run_at_once_and_loses_nothing(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    failure = train(launcher, run, best="highest scor").failure
    assert failure is not None and failure.kind == "user", failure
    assert "names the metric 'scor'" in failure.text and "it gives loss, score; did you mean 'score'" in failure.text
    assert kept(run) == [1]
    failure = train(launcher, tmp_path / "other", held_out=False).failure
    assert failure is not None and failure.kind == "user", failure
    assert "data() returns no split named 'val', but train" in failure.text


def test_a_loop_that_decides_by_a_metric_decides_alike_on_every_rank_hg05(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Rank 1 makes 10 less of each number, and would stop at step 1; left alone, rank 0 would then wait for it."""
    sets = {"values": [0, 1, 5, 3, 6], "by_rank": -10.0}
    payload = {"task": FOLLOWED, "plan": "dp=2", "sets": sets, "run": str(tmp_path / "run")}
    result = launcher.run(Job("evaluation_entries:stop_early", payload, 2, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    assert [rank["scores"] for rank in result.results.values()] == [[1.0, 5.0, 3.0]] * 2
    assert kept(tmp_path / "run") == [2, 3]


@pytest.mark.matrix
def test_the_ranking_example_learns_more_than_which_items_are_liked(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Rows from two workers through summarize; the best step by them is kept."""
    summary = trained(launcher, tmp_path / "run", task=RANKING, steps=300, eval_every=100)
    beside = load_task(RANKING).baselines()
    assert beside["auc of items' click rates"] < 0.62
    assert summary["evaluation"]["auc"] > 0.70
    assert summary["evaluation"]["loss"] < beside["loss of one click rate"] - 0.05
    assert summary["best"]["metric"] == "auc" and summary["best"]["value"] >= summary["evaluation"]["auc"]
