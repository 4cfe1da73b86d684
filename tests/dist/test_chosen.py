"""What the planner puts first is no theory: each of its first five plans trains, with the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import Starter
from stretto.choose import fitting
from stretto.doctor.links import measure_links
from stretto.launch import LocalLauncher
from stretto.observe.events import read_lines
from stretto.plan import Plan
from stretto.planning import Wanted, predict
from stretto.preload import preloads

ROOT = Path(__file__).resolve().parents[2]
CNN, TOWERS, LLAMA = (ROOT / "tests" / "tasks" / f"{name}.py" for name in ("cnn_skips", "towers", "llama"))
SETS = {"steps": "3", "precision": "fp64"}


def losses(run: Path) -> dict[int, float]:
    lines = (line for path in (run / "events").glob("*.jsonl") for line in read_lines(path))
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


@pytest.mark.matrix  # half a minute each
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "task",
    (CNN, TOWERS, LLAMA),
    ids=lambda task: task.stem,
)
def test_the_first_five_plans_train_to_one_devices_losses(tmp_path: Path, task: Path) -> None:
    with LocalLauncher(preloads(Plan(dp=2, zero=3))) as launcher:
        found = predict(launcher, Wanted(str(task), SETS, 2, links=measure_links(2, launcher)), lambda one: None)
        starter = Starter(launcher)
        starter.good(tmp_path / "alone", task, "dp=1", **SETS)
        expected = losses(tmp_path / "alone")
        first = [one.plan for one in fitting(found.plans)[:5]]
        for place, plan in enumerate(first):
            starter.good(tmp_path / str(place), task, plan, **SETS)
            assert losses(tmp_path / str(place)) == pytest.approx(expected, rel=1e-12), plan
    assert len(first) == len(set(first)) == 5 and len(expected) == 3 and not found.failed
