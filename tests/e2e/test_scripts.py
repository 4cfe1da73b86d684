"""A script with its own loop, started in every way there is; and its numbers, those of ``stretto train``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
LINE = Path(__file__).resolve().parents[1] / "tasks" / "line.py"
SCRIPT = """
import sys
from pathlib import Path

import beside  # a module in the script's folder

import stretto

plan, folder = sys.argv[1], sys.argv[2]
run = stretto.start(beside.TASK, plan=plan or None, settings={"precision": "fp64", "batch": 7}, run=folder)
for batch in run.batches():
    out = run.step(batch)
    run.state["losses"] = [*run.state.get("losses", []), out.loss]
    run.log(loss=out.loss)
print("said once by the lowest rank")
summary = run.finish()
Path(folder, "losses").write_text(repr(run.state["losses"]))
"""

THREADS = """
import json, os, sys
from pathlib import Path

import beside

import stretto


def threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


plan, folder = sys.argv[1], sys.argv[2]
run = stretto.start(beside.TASK, plan=plan, settings={"precision": "fp64", "batch": 7}, run=folder)
for batch in run.batches():
    run.step(batch)
during = threads()
run.finish()
Path(f"{folder}-{os.environ['RANK']}").write_text(json.dumps([during, threads()]))
"""

pytestmark = pytest.mark.timeout(150)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "loop.py").write_text(SCRIPT)
    (folder / "beside.py").write_text(f"TASK = {str(LINE)!r}\n")
    (folder / "elsewhere").mkdir()
    return folder


def started(room: Path, name: str, *words: str) -> Ended:
    """Runs ``words`` from another folder than the script's."""
    done = subprocess.run(words, cwd=room / "elsewhere", capture_output=True, text=True, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr, room / name)


@pytest.fixture(scope="module")
def with_two(room: Path) -> Ended:
    """``stretto run --workers 2``."""
    script, folder = str(room / "loop.py"), str(room / "two")
    return started(room, "two", str(BIN / "stretto"), "run", script, "--workers", "2", "--", "", folder)


def test_stretto_run_starts_the_workers_and_shows_the_run(with_two: Ended) -> None:
    assert with_two.code == 0, with_two.out + with_two.err
    assert with_two.summary["plan"] == "dp=2"
    assert with_two.out.startswith("starting 2 workers ...\n")
    assert "plan      dp=2  (start())" in with_two.out
    assert "step 8/8  loss " in with_two.out
    assert with_two.out.count("said once by the lowest rank") == 1
    assert "Next:\n  stretto audit " in with_two.out
    logs = sorted(path.name for path in (with_two.folder / "logs").iterdir())
    assert logs == ["member-m1.log", "member-m2.log"]


def test_the_own_loop_and_stretto_train_give_identical_numbers(room: Path, with_two: Ended) -> None:
    sets = ("--set", "precision=fp64", "--set", "batch=7")
    folder = str(room / "train")
    ours = started(room, "train", str(BIN / "stretto"), "train", str(LINE), "--workers", "2", *sets, "--run", folder)
    assert ours.code == 0, ours.out + ours.err
    assert ours.summary["final_loss"] == with_two.summary["final_loss"]
    assert ours.summary["samples"] == with_two.summary["samples"]


def test_plain_python_is_one_worker_with_the_same_numbers(room: Path, with_two: Ended) -> None:
    alone = started(room, "one", sys.executable, str(room / "loop.py"), "", str(room / "one"))
    assert alone.code == 0, alone.err
    assert (alone.summary["plan"], alone.summary["world_size"]) == ("dp=1", 1)
    one, two = (json.loads((run.folder / "losses").read_text()) for run in (alone, with_two))
    assert len(one) == 8
    assert two == pytest.approx(one, rel=1e-12)


def test_plain_python_refuses_a_plan_for_two_with_the_command_to_use(room: Path) -> None:
    refused = started(room, "none", sys.executable, str(room / "loop.py"), "dp=2", str(room / "none"))
    assert refused.code == 2
    (last,) = refused.err.strip().splitlines()  # one line, no traceback
    assert "plan dp=2 needs 2 worker(s), but 1 was started" in last
    assert "`stretto run loop.py --workers 2`" in last
    assert not refused.folder.exists()


def test_torchrun_starts_it_too(room: Path, with_two: Ended) -> None:
    words = ("--nproc-per-node", "2", "--standalone", str(room / "loop.py"), "", str(room / "torchrun"))
    started_by_it = started(room, "torchrun", str(BIN / "torchrun"), *words)
    assert started_by_it.code == 0, started_by_it.err
    assert started_by_it.summary["final_loss"] == with_two.summary["final_loss"]


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])  # with zero=3 FSDP2 keeps a mesh for itself, and so its group
def test_nothing_of_gloo_outlives_a_run_that_has_finished(room: Path, plan: str) -> None:
    """A thread of it that frees a tensor while the interpreter ends would abort a run that has ended well."""
    (room / "threads.py").write_text(THREADS)
    folder = room / f"threads-{plan}"
    words = ("--nproc-per-node", "2", "--standalone", str(room / "threads.py"), plan, str(folder))
    ended = started(room, folder.name, str(BIN / "torchrun"), *words)
    assert ended.code == 0, ended.err
    for rank in range(2):
        during, after = json.loads((room / f"{folder.name}-{rank}").read_text())
        assert during > 0 == after


def test_a_script_that_is_no_python_costs_one_line(room: Path) -> None:
    (room / "broken.py").write_text("import stretto\n\ndef (\n")
    broken = started(room, "none", str(BIN / "stretto"), "run", str(room / "broken.py"))
    assert broken.code == 2
    assert broken.err == f"stretto: script: {room / 'broken.py'}, line 3: invalid syntax\n"


def test_a_mistake_after_the_group_has_formed_is_one_line_too(room: Path, with_two: Ended) -> None:
    """torch.distributed holds standard error back while an excepthook runs."""
    again = started(room, "two", sys.executable, str(room / "loop.py"), "", str(room / "two"))
    assert again.code == 2
    assert "holds a run already" in again.err and "Traceback" not in again.err


def test_a_script_given_for_a_task_and_a_task_for_a_script_are_told_apart(room: Path) -> None:
    task = started(room, "runs", str(BIN / "stretto"), "train", str(room / "loop.py"))
    assert task.code == 2 and "`stretto run loop.py`" in task.err.replace(str(room) + "/", "")
    assert not list((room / "elsewhere").glob("runs/*")), "nothing was trained on the way"
    script = started(room, "runs", str(BIN / "stretto"), "run", str(LINE))
    assert script.code == 2 and "never called stretto.start()" in script.err


def test_a_loop_that_forgets_to_finish_keeps_its_save_and_is_told(room: Path) -> None:
    (room / "forgets.py").write_text(
        f"import stretto\nrun = stretto.start({str(LINE)!r}, run={str(room / 'forgets')!r})\n"
        "for batch in run.batches():\n    run.step(batch)\n    if batch.step == 3:\n        run.save()\n        break\n"
    )
    left = started(room, "forgets", sys.executable, str(room / "forgets.py"))
    assert left.code == 0
    assert "left at step 3 without run.finish(): the checkpoint of step 3" in left.err
    assert (left.folder / "checkpoints" / "step-00000003" / "manifest.json").is_file()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_processes_that_build_different_models_are_told_before_a_step_sh12(room: Path, plan: str) -> None:
    """Each process of a script builds the model; what it draws from a generator of its own must not differ."""
    own = "torch.nn.init.normal_(module[0].bias, generator=torch.Generator().manual_seed(os.getpid()))"
    folder = room / f"apart-{plan}"
    folder.mkdir()
    (folder / "apart.py").write_text(
        f"import os\nfrom line import *\n\ndef model():\n    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))\n"
        f"    {own}\n    return module\n"
    )
    (folder / "line.py").write_text(LINE.read_text())
    (folder / "loop.py").write_text(
        f"import stretto\nrun = stretto.start('{folder}/apart.py', plan='{plan}', run='{folder}/run')\n"
        "for batch in run.batches():\n    run.step(batch)\nrun.finish()\n"
    )
    apart = started(room, "none", str(BIN / "stretto"), "run", str(folder / "loop.py"), "--workers", "2")
    assert apart.code == 2
    assert "model() built another '0.bias' on rank" in apart.err and "1 of 4 tensors differ" in apart.err
    assert "Traceback" not in apart.err
