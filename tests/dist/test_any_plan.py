"""A checkpoint of any plan is one of every other: each tensor to the bit, and the next step's numbers are one device's.

The pairs of plans are drawn from the grid of `tests/parity/test_axes_grid.py`, by a fixed seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runs import Starter
from stretto.launch import Job, LocalLauncher
from stretto.observe.events import read_lines
from stretto.plan import Plan
from stretto.verify.run import preloads

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
TOWERS, LLAMA, CNN, WORDS = (
    ROOT / "tests" / "tasks" / f"{name}.py" for name in ("towers", "llama", "cnn_skips", "word_losses")
)
PLANS = (
    *("dp=1", "dp=3", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp_replicate=2,dp_shard=2"),
    *("tp=2", "tp=3,microbatches=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"),
    *("pp=2", "pp=3,microbatches=3", "pp=2,schedule=interleaved,chunks=3,microbatches=4"),
    *("pp=2,schedule=zero-bubble,microbatches=3", "dp=2,pp=2,zero=2", "dp=2,pp=2,zero=3,microbatches=2"),
    *("tp=2,pp=2,microbatches=2", "dp=2,tp=2,pp=2,zero=3", "dp=2,tp=2,pp=2,zero=1,schedule=interleaved"),
    *("branch=2", "dp=2,branch=2,zero=2", "tp=2,branch=2,microbatches=2"),
    *("branch=2,pp=2,microbatches=3", "dp=2,branch=2,pp=2,zero=3"),
)
# Through all that cuts, and back to one device; from there, and between two ways of cutting layers.
CI = (
    (TOWERS, "tp=2,pp=2,microbatches=2", "dp=2,zero=3"),
    (TOWERS, "dp=2,pp=2,zero=3,microbatches=2", "dp=1"),
    *(
        pytest.param(TOWERS, *pair, marks=pytest.mark.matrix)  # parts of the rows beside them
        for pair in (
            ("tp=3,microbatches=2", "pp=3,microbatches=3"),
            ("branch=2", "dp=2"),
            ("dp=2,zero=3", "dp=2,branch=2,zero=2"),
            ("branch=2,pp=2,microbatches=2", "dp=2"),
            ("dp=2,branch=2,pp=2,zero=2", "dp=1"),
        )
    ),
    (WORDS, "tp=3,microbatches=2", "dp=1"),  # a vocabulary of 13 in parts, and whole
    pytest.param(CNN, "tp=2,pp=2", "dp=1", marks=pytest.mark.matrix),  # with running statistics, in parts of a stage
)
NORMS = (
    (CNN, "dp=2,tp=2,pp=2,zero=1,schedule=interleaved", "dp=2,zero=3"),
    (CNN, "dp=2,pp=2,zero=2", "tp=3"),
    (CNN, "dp=1", "dp=2,tp=2,zero=3"),
)


def drawn(count: int) -> list[tuple[Path, str, str]]:
    draw = Random(20)
    return [(draw.choice((TOWERS, LLAMA)), *draw.sample(PLANS, 2)) for _ in range(count)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with LocalLauncher(preloads(["dp=2,zero=3", "tp=2"])) as launcher:
        yield Starter(launcher)


def losses(run: Path) -> dict[int, float]:
    lines = (line for path in (run / "events").glob("*.jsonl") for line in read_lines(path))
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def scores(run: Path) -> dict[int, float]:
    lines = (line for path in (run / "events").glob("*.jsonl") for line in read_lines(path))
    return {line["step"]: line["accuracy"] for line in lines if line["kind"] == "evaluation"}


def digests(checkpoints: Path, step: int) -> dict[str, str]:
    manifest = json.loads((checkpoints / f"step-{step:08}" / "manifest.json").read_text())
    return {name: tensor["digest"] for name, tensor in manifest["tensors"].items()}


def carried_over(
    starter: Starter, folder: Path, task: Path, first: str, second: str, apart: bool = False
) -> None:
    """Two steps under one plan, the third under another; ``apart``: where no memory can be shared."""
    work = {"entry": "gathered_entries:apart"} if apart else {}
    again_by = "gathered_entries:resaved" if apart else "any_plan_entries:resaved"
    sets: dict[str, Any] = {"steps": 3, "precision": "fp64", **({"eval_every": 1} if task == CNN else {})}
    run, again, alone = folder / "run", folder / "again", folder / "alone"
    starter.good(run, task, first, stop=2, **work, **sets)
    saved = run / "checkpoints" / "step-00000002"
    payload = {"task": str(task), "sets": sets, "plan": second, "checkpoint": str(saved), "folder": str(again)}
    workers = Plan.parse(second).world_size
    result = starter.launcher.run(Job(again_by, payload, workers, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    before = digests(run / "checkpoints", 2)
    assert digests(again, 2) == before and any(name.startswith("optimizer/main/") for name in before)
    starter.good(run, task, second, attempt=2, **work, **sets)
    starter.good(alone, task, "dp=1", **sets)
    found, expected = losses(run), losses(alone)
    assert found.keys() == expected.keys() == {1, 2, 3}
    assert found == pytest.approx(expected, rel=1e-12)
    if task == CNN:  # the only one that evaluates by a count
        assert scores(run) == scores(alone) and len(scores(run)) == 3
    assert digests(run / "checkpoints", 3).keys() == digests(alone / "checkpoints", 3).keys()


@pytest.mark.parametrize(("task", "first", "second"), CI, ids=lambda value: str(value).rpartition("/")[2])
def test_a_checkpoint_of_one_plan_goes_on_under_another(
    starter: Starter, tmp_path: Path, task: Path, first: str, second: str
) -> None:
    carried_over(starter, tmp_path, task, first, second)


@pytest.mark.parametrize(
    ("task", "first", "second"),
    [
        pytest.param(CNN, "dp=2,pp=2,zero=3", "dp=2,tp=2,zero=3", marks=pytest.mark.matrix),
        (TOWERS, "dp_replicate=2,dp_shard=2,branch=2", "dp=3,pp=2,zero=3"),
    ],
    ids=lambda value: str(value).rpartition("/")[2],
)
def test_a_checkpoint_goes_on_where_weights_are_gathered(
    starter: Starter, tmp_path: Path, task: Path, first: str, second: str
) -> None:
    carried_over(starter, tmp_path, task, first, second, apart=True)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("task", "first", "second"), (*drawn(10), *NORMS), ids=lambda value: str(value).rpartition("/")[2])
def test_ten_drawn_pairs_of_plans_and_some_of_norms(starter: Starter, tmp_path: Path, task: Path, first: str, second: str) -> None:
    carried_over(starter, tmp_path, task, first, second)
