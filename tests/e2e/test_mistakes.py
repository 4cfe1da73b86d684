"""A newcomer's mistakes: each costs one clear line, no traceback, an exit code, and nothing left running.

Most are made against a fork server that has its imports behind it, as the commands make them but for the parsing of
the command line; what the command itself must keep right (its output, its signals) is done with the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.display import Display
from stretto.cli.launching import conclude
from stretto.launch import Job, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan

STRETTO = str(Path(sys.executable).parent / "stretto")
GOOD = """
import torch
from torch import nn
from torch.utils.data import Dataset

from stretto.losses import mse
from stretto.recipe import Recipe


class Rows(Dataset):
    def __init__(self, points, y):
        self.points, self.y = points, y

    def __len__(self):
        return self.points

    def __getitem__(self, index):
        return {"x": torch.tensor([index / 10]), "y": torch.tensor([self.y])}


def model(width: int = 4):
    return nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))


def data(points: int = 16, y: float = 0.5):
    return Rows(points, y)


def inputs(batch):
    return batch["x"]


def loss(output, batch):
    return mse(output, batch["y"])


def optimizer(params, lr: float = 0.1):
    return torch.optim.SGD(params, lr=lr)


def recipe(batch: int = 4, steps: int = 4):
    return Recipe(batch=batch, steps=steps)
"""

pytestmark = pytest.mark.timeout(150)  # a first start loads torch from a cold disk


@dataclass(frozen=True)
class Told:
    """What a job's end was on the terminal."""

    code: int
    out: str
    err: str

    def line(self) -> str:
        """The one line that it cost."""
        assert self.code == 2, self
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.out + self.err
        return self.err


@dataclass(frozen=True)
class Newcomer:
    """Trains tasks in a folder of its own."""

    launcher: LocalLauncher
    folder: Path
    capture: pytest.CaptureFixture[str]

    def trains(self, text: str, plan: str = "dp=1", **sets: Any) -> Told:
        path = self.folder / "task.py"
        path.write_text(text)
        run = self.folder / "run"
        run.mkdir()
        order = TrainOrder(str(path), sets, plan, "test", str(run))
        job = Job(
            "stretto.training:work",
            order.to_payload(),
            Plan.parse(plan).world_size,
            prepare="stretto.training:prepare",
            log_dir=run / "logs",
        )
        with Display() as display:
            code = conclude(self.launcher.run(job, display.on_event, display.on_output), display, run)
        return Told(code, *self.capture.readouterr())


@pytest.fixture
def newcomer(launcher: LocalLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Newcomer:
    return Newcomer(launcher, tmp_path, capsys)


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


PLAIN_LOSS = 'return mse(output, batch["y"])'
MISTAKES = (
    # ---- settings
    (GOOD, "dp=1", {"widht": "3"}, "--set widht: no such setting; did you mean 'width'?"),
    (GOOD, "dp=1", {"lr": "fast"}, "--set lr=fast: expected float like 0.1, got 'fast'"),
    (GOOD, "dp=1", {"lr": "nan"}, "--set lr=nan: nan is no number to compute with"),
    (GOOD, "dp=1", {"clip": "nan"}, "--set clip=nan: nan is no number to compute with"),
    (GOOD, "dp=1", {"batch": "2.5"}, "--set batch=2.5: expected int like 4"),
    (GOOD, "dp=1", {"batch": "0"}, "recipe: batch must be a whole number of at least 1, got 0"),
    (GOOD, "dp=1", {"lr": "-1"}, "optimizer() does not work with --set lr=-1.0: ValueError: Invalid learning rate"),
    (GOOD, "dp=1", {"width": "-3"}, "model() does not work with --set width=-3: RuntimeError"),
    # ---- the task's functions
    (changed(PLAIN_LOSS, "return mse(output, batch['y'])[0]"), "dp=2", {}, "task: loss returned one tensor; return"),
    (changed(PLAIN_LOSS, "return None"), "dp=2", {}, "task: loss must return the pair (sum, weight), got NoneType"),
    (
        changed(PLAIN_LOSS, 'return mse(output, batch["labels"])'),
        "dp=2",
        {},
        "task: loss() asked the batch for 'labels'; it has: x, y\n",
    ),
    (changed('return batch["x"]', 'return batch["X"]'), "dp=1", {}, "inputs() asked the batch for 'X'; it has: x, y"),
    (
        changed("torch.optim.SGD(params, lr=lr)", "torch.optim.LBFGS(params, lr=lr)"),
        "dp=2",
        {},
        "optimizer() returned LBFGS, whose step() must be given a closure",
    ),
    (
        changed("return nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))", "return [nn.Linear(1, width)]"),
        "dp=1",
        {},
        "model() must return a torch.nn.Module, got list",
    ),
    # ---- no data
    (changed("return Rows(points, y)", "Rows(points, y)"), "dp=1", {}, "task: data() returned None; it must return a"),
    (GOOD, "dp=2", {"points": "0"}, "data()['train'] is empty; give it at least one sample"),
    (
        GOOD,
        "dp=2",
        {"y": ".inf"},
        "steps 1 to 4 were all skipped, as the gradient is not finite; the loss of step 1 is",
    ),
    # ---- wrong file
    ("print('no task')\n", "dp=1", {}, "missing the function(s) model(), data(), loss(), optimizer(), recipe()"),
    ("import not_installed\n", "dp=1", {}, "task.py, line 1: No module named 'not_installed'; install it, or put it"),
    ("def model(:\n", "dp=1", {}, "task.py, line 1: invalid syntax"),
)


@pytest.mark.parametrize(("text", "plan", "sets", "says"), MISTAKES)
def test_a_mistake_costs_one_line(newcomer: Newcomer, text: str, plan: str, sets: dict[str, str], says: str) -> None:
    began = time.monotonic()
    line = newcomer.trains(text, plan, **sets).line()
    assert line.startswith("stretto: ") and says in line
    assert time.monotonic() - began < 20, "it took too long to be told"


def test_a_run_that_stops_learning_is_ended_after_50_steps(newcomer: Newcomer) -> None:
    """The update of step 1 is too large for any number; from then on every loss is nan."""
    line = newcomer.trains(GOOD, "dp=2", lr="1e38", steps="500").line()
    assert "steps 2 to 51 were all skipped, as the gradient is not finite; the loss of step 2 is nan" in line
    assert "at a learning rate of 1e+38" in line
    events = (newcomer.folder / "run" / "events" / "member-m1.jsonl").read_text()
    assert '"step":51' in events and '"step":52' not in events


def test_a_batch_smaller_than_the_world_just_works(newcomer: Newcomer) -> None:
    told = newcomer.trains(GOOD, "dp=3", batch="2", points="5")
    assert told.code == 0 and told.err == ""


OUTSIDE = GOOD.replace(
    "def model(width: int = 4):\n    return nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))",
    "class Own(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.parts = nn.ModuleList([nn.Linear(1, 8)])\n\n"
    "    def forward(self, x):\n"
    "        return nn.functional.linear(x, self.parts[0].weight).sum(1, True)\n\n\n"
    "def model():\n    return Own()",
)


@pytest.mark.parametrize(("batch", "place"), [("8", "(task.py, line"), ("4", "and so gets a shard")])
def test_a_parameter_read_outside_of_its_module_is_told_where_it_is_sharded_sh02(
    newcomer: Newcomer, batch: str, place: str
) -> None:
    """Of a single row torch makes shards again, which nothing minds before the loss is added up."""
    line = newcomer.trains(OUTSIDE, "dp_replicate=2,dp_shard=2", batch=batch).line()
    assert "reads a parameter without calling the module that it belongs to" in line
    assert place in line and "use zero=0" in line


def test_a_parameter_read_outside_of_its_module_is_there_whole_where_there_is_one_copy(newcomer: Newcomer) -> None:
    assert newcomer.trains(OUTSIDE, "dp=2,zero=3").code == 0


def test_a_programs_error_shows_the_users_frames_and_the_log_the_whole(newcomer: Newcomer) -> None:
    told = newcomer.trains(changed(PLAIN_LOSS, "return mse(output, {}['y'])"), "dp=2")
    assert told.code == 1
    head, trace = told.err.split("Traceback (most recent call last):\n")
    assert head.startswith("rank ") and head.endswith(" failed:\n")
    assert "stretto/" not in trace and "in loss" in trace and trace.endswith("KeyError: 'y'\n")
    logs = "".join(path.read_text() for path in (newcomer.folder / "run" / "logs").iterdir())
    assert "stretto/step.py" in logs and "stretto/task.py" in logs


# ------------------------------------------------------------------------------------------- with the command


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [STRETTO, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "STRETTO_TEST_FOLDER": str(folder)},  # by which what it started is known
    )


def left_of(folder: Path) -> list[str]:
    """What still runs of all that was started for ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if f"STRETTO_TEST_FOLDER={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return [line for line in found if line]


def test_what_a_task_prints_on_import_is_kept_out_of_json(tmp_path: Path) -> None:
    """By Python, by a program, and past both."""
    prints = 'import os\nprint("one")\nos.system("echo two")\nos.write(1, b"three\\n")\n'
    (tmp_path / "task.py").write_text(prints + GOOD)
    process = command(tmp_path, "train", "task.py", "--workers", "2", "--json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert json.loads(out)["finished"] is True
    assert err.split() == ["one", "two", "three"]


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """At once: the second is told who has it. One after the other: it is told of the run that is there."""
    (tmp_path / "task.py").write_text(GOOD)
    words = ("train", "task.py", "--run", "here")
    first, second = command(tmp_path, *words), command(tmp_path, *words)
    ends = {process: process.communicate(timeout=100) for process in (first, second)}
    lost, won = sorted(ends, key=lambda process: process.returncode, reverse=True)
    assert (won.returncode, lost.returncode) == (0, 2), ends
    told = ends[lost][1]
    assert "here is in use by process" in told or "here holds a run already" in told
    assert told.count("\n") == 1
    third = command(tmp_path, *words)
    _, told = third.communicate(timeout=100)
    assert third.returncode == 2
    assert told == "stretto: here holds a run already: `stretto resume here`, or give another --run\n"


@pytest.mark.parametrize("when", ["loading", "importing", "in model()", "in the first step"])
def test_a_ctrl_c_at_once_costs_one_line(tmp_path: Path, when: str) -> None:
    slow = f"open('{when}', 'w').close(); import time; time.sleep(60)"
    text = {"in model()": changed("return nn.Seq", f"{slow}; return nn.Seq"), "in the first step": GOOD}.get(when, GOOD)
    if when == "in the first step":
        # The probe before the launch calls loss() too, without gradients.
        worker = "__import__('torch').is_grad_enabled()"
        brief = f"{worker} and (open('{when}', 'w').close(), __import__('time').sleep(2))"
        text = changed(PLAIN_LOSS, f"{brief}; {PLAIN_LOSS}")
    (tmp_path / "task.py").write_text(text)
    process = command(tmp_path, "train", "task.py", "--workers", "2", "--run", "run")
    if when == "loading":
        while "_yaml" not in Path(f"/proc/{process.pid}/maps").read_text():  # a library that the command loads
            time.sleep(0.001)
    elif when == "importing":
        assert process.stdout is not None
        assert process.stdout.readline() == "starting 2 workers ...\n"
    else:
        while not (tmp_path / when).exists():
            assert process.poll() is None
            time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    if when == "in the first step":  # it is a good step, and is kept
        assert err == "" and "stopped after step 1 of 4" in out
    else:
        assert err.startswith("stretto: interrupted") and err.count("\n") == 1
        assert not (tmp_path / "run").exists()
    assert left_of(tmp_path) == []
