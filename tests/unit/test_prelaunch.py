"""Probing before a launch: in a process of its own, within its time, once for each content, and what it may cost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stretto.assemble import build_template
from stretto.errors import Refused, TaskError
from stretto.plan import Plan
from stretto.prelaunch import Verdict, examine, settle, since
from stretto.probes.cache import MOST_FILES, content_key
from stretto.runfolder import Law, Resolved
from stretto.task import Task, load_task

TASK = """
import os, signal, time
from pathlib import Path

import numpy, torch
import torch.nn.functional as F
from stretto.errors import TaskError
from stretto.losses import mse
from stretto.recipe import Recipe

import beside_{name}

HERE = Path(__file__).parent


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), Odd())


class Odd(torch.nn.Module):
    def forward(self, x):
        if {how!r} == "single":
            x = F.linear(x, torch.from_numpy(numpy.eye(3, dtype="float32")))
        return x


def data():
    with open(HERE / "reads", "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    print("reading")
    os.write(1, b"reading\\n")
    if {how!r} == "slow":
        time.sleep(30)
    if {how!r} == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if {how!r} == "bug":
        raise RuntimeError("a bug")
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x)


def loss(output, batch):
    if {how!r} == "mistake":
        raise TaskError("task: the user's own words")
    return (F.mse_loss(output, batch[1]), 1) if {how!r} == "mean" else mse(output, batch[1])


def optimizer(params, lr=0.1, kind="SGD"):
    return getattr(torch.optim, kind)(list(params), lr=lr)


def recipe(batch=6, steps=2):
    return Recipe(batch=batch, steps=steps)
"""


def write(folder: Path, how: str = "well") -> Path:
    """A task of a name of its own, so that no test finds another's module loaded."""
    folder.mkdir(exist_ok=True)
    name = f"{folder.parent.name}_{folder.name}".replace("-", "_")
    (folder / f"beside_{name}.py").write_text("VALUE = 1\n")
    (folder / f"{name}.py").write_text(TASK.format(name=name, how=how))
    return folder / f"{name}.py"


def examined(task: Task, plan: str = "dp=2", seconds: float = 20.0) -> Verdict:
    assert task.path is not None
    run = task.path.parent / "runs" / "one"
    return examine(task, Plan.parse(plan), lambda: build_template(task).structure, run, seconds)


def reads(task: Task) -> list[int]:
    """The processes that have read the data, one entry a time."""
    assert task.path is not None
    path = task.path.parent / "reads"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def kept(task: Task) -> list[Path]:
    assert task.path is not None
    return sorted((task.path.parent / "runs" / ".probes").glob("*"))


def test_probes_run_once_for_each_content_and_in_another_process(tmp_path: Path) -> None:
    path = write(tmp_path / "t")
    task = load_task(path)
    assert examined(task) == Verdict()
    assert len(reads(task)) == 1 and reads(task)[0] != os.getpid()
    assert examined(task) == examined(task, "dp=3,zero=3") == Verdict()
    assert len(reads(task)) == 1, "found in the cache, under another plan too"
    (file,) = kept(task)
    file.write_text(file.read_text()[:-9])
    assert examined(task) == Verdict()
    assert len(reads(task)) == 2, "a damaged file is not believed"
    assert json.loads(file.read_text())["reach"] == "element", "and is written anew"
    assert examined(load_task(path, {"lr": 0.2})) == Verdict()
    assert len(reads(task)) == 3, "other settings"
    (path.parent / f"beside_{path.stem}.py").write_text("VALUE = 2\n")
    assert examined(task) == Verdict()
    assert len(reads(task)) == 4, "a module beside the task has changed"
    assert len(kept(task)) == 3


def test_a_refusal_is_kept_too(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", "mean"))
    first, second = examined(task), examined(task, "dp=2,microbatches=2")
    assert "the weight over 5 samples is 1" in first.refusal and "plan dp=2,microbatches=2" in second.refusal
    assert len(reads(task)) == 1


def test_degree_1_is_not_probed(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", "mean"))
    assert examined(task, "dp=1,zero=3") == Verdict()
    assert reads(task) == []


@pytest.mark.alone
def test_what_takes_too_long_is_ended_and_costs_a_note(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", "slow"), {"kind": "Adafactor"})
    examined(task, seconds=0.01)  # torch's parts are loaded by now
    began = time.monotonic()
    verdict = examined(task, "dp=2,zero=3", seconds=2.0)
    assert time.monotonic() - began < 6
    (note,) = verdict.notes
    assert note.startswith("the split probe did not finish in 2 s; `stretto verify ")
    assert note.endswith("--plan dp=2,zero=3` tells whether the plan keeps the numbers")
    assert "looks at whole tensors" in verdict.refusal, "what was known by then counts"
    assert not Path(f"/proc/{reads(task)[-1]}").exists(), "nothing is left running"
    assert kept(task) == [], "an answer that is not whole is not kept"


def test_a_crash_costs_a_note(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", "crash"))
    verdict = examined(task)
    assert verdict.refusal == ""
    assert len(verdict.notes) == 1 and "was ended by signal 11" in verdict.notes[0]
    assert kept(task) == []


def test_a_bug_of_the_task_is_left_to_the_run_and_a_mistake_is_told(tmp_path: Path) -> None:
    bug = load_task(write(tmp_path / "bug", "bug"))
    assert examined(bug) == Verdict() and kept(bug) == []
    verdict = examined(load_task(write(tmp_path / "mistake", "mistake")))
    assert verdict.mistake == "task: the user's own words"
    with pytest.raises(TaskError, match="the user's own words"):
        settle(verdict, True, "--force", pytest.fail)


def test_what_cannot_run_in_float64_is_told(tmp_path: Path) -> None:
    verdict = examined(load_task(write(tmp_path / "t", "single")))
    assert len(verdict.notes) == 1
    assert "the split probe could not run the task in float64 (RuntimeError" in verdict.notes[0]


def test_what_the_task_prints_is_not_printed_by_a_probe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for how in ("crash", "well", "bug"):
        task = load_task(write(tmp_path / how, how))
        examined(task)
        assert len(reads(task)) == 1
    assert capfd.readouterr() == ("", "")


def test_a_model_that_has_no_room_is_left_out(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t"))
    huge = nn.Linear(10**6, 10**6, device="meta")
    verdict = examine(task, Plan(dp=2), lambda: huge, tmp_path / "runs" / "one")
    assert len(verdict.notes) == 1 and "left out: in float64 the model needs about 22351.8 GiB" in verdict.notes[0]


def test_the_cache_stays_small_and_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t"))
    folder = tmp_path / "t" / "runs" / ".probes"
    folder.mkdir(parents=True)
    for place in range(MOST_FILES + 5):
        (folder / f"{place}.json").write_text("{}")
        os.utime(folder / f"{place}.json", (place, place))
    examined(task)
    assert len(kept(task)) == MOST_FILES
    assert (folder / f"{content_key(task)}.json").is_file()
    other = load_task(write(tmp_path / "u"))
    (tmp_path / "u" / "runs").write_text("a file")
    assert examined(other) == Verdict()


def test_an_object_has_no_key(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t"))
    holder = type("Holder", (), {name: staticmethod(function) for name, function in task.functions.items()})
    assert content_key(load_task(holder)) is None


def test_force_lets_pass_says_so_and_is_remembered() -> None:
    said: list[dict[str, Any]] = []
    broken = Verdict(refusal="plan dp=2: because", notes=("n",))
    with pytest.raises(Refused, match=r"^plan dp=2: because; or train all the same with --force$"):
        settle(broken, False, "--force", said.append)
    assert said == []
    law = settle(broken, True, "--force", said.append)
    assert law == Law(False, "plan dp=2: because")
    assert [event["text"] for event in said] == ["n", "the law is not kept: plan dp=2: because"]
    said.clear()
    assert settle(Verdict(), True, "--force", said.append) == Law()
    assert said[0]["text"] == "--force has no effect: nothing was refused"
    before = Resolved(name="", task=None, settings={}, recipe={}, plan={}, cluster={}, law=law)
    assert since(before, Law()) == law and since(None, Law()) == Law()


def test_no_force_helps_where_ranks_would_wait_for_ever() -> None:
    with pytest.raises(Refused, match=r"^plan: never$"):
        settle(Verdict(refusal="plan: never", final=True), True, "--force", pytest.fail)
    assert Verdict.from_json(Verdict("a", True, "b", ("c",)).to_json()) == Verdict("a", True, "b", ("c",))
