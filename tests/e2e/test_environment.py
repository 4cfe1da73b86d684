"""What surrounds a run: files that change or vanish, limits, folders that can't be written, what a kill left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.elastic.ledger import audit

STRETTO = str(Path(sys.executable).parent / "stretto")
LINE = Path(__file__).resolve().parents[1] / "tasks" / "line.py"

pytestmark = pytest.mark.timeout(150)  # a first start loads torch from a cold disk


def stretto(folder: Path, *words: str, files: int | None = None) -> subprocess.CompletedProcess[str]:
    """A command, under a limit on open files where one is given."""
    limit = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"] if files is not None else []
    return subprocess.run([*limit, STRETTO, *words], cwd=folder, capture_output=True, text=True, timeout=120)


def good(folder: Path, *words: str) -> str:
    done = stretto(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    return done.stderr


# -------------------------------------------------------------------------- a task that changed, moved or vanished


def test_a_task_that_changed_is_told_with_the_difference_and_one_that_is_gone_is_there_still(tmp_path: Path) -> None:
    """The task imports a module from beside it; both change, then both vanish, and the run folder moves."""
    beside = tmp_path / "beside"
    beside.mkdir()
    text = LINE.read_text().replace("import torch\n", "import slope\nimport torch\n", 1)
    (beside / "task.py").write_text(text.replace("torch.sin(2 * x)", "torch.sin(slope.STEEP * x)"))
    (beside / "slope.py").write_text("STEEP = 2\n")
    good(tmp_path, "train", "beside", "--workers", "1", "--set", "steps=2", "--run", "run")
    assert (tmp_path / "run" / "slope.py").read_text() == "STEEP = 2\n"

    (beside / "slope.py").write_text("STEEP = 3\n")
    for words, says in (
        (("--set", "lr=1"), "--set lr: a run keeps the numbers that it began with, so lr stays 0.1; steps, eval_every"),
        (("--set", "stesp=9"), "--set stesp: this run has no such setting; did you mean 'steps'?"),
    ):
        assert says in one_line(stretto(tmp_path, "resume", "run", *words))
    assert good(tmp_path, "resume", "run", "--set", "save_every=1") == "run is finished: all 2 steps are done\n"
    out = good(tmp_path, "resume", "run", "--set", "steps=4")
    told = out[out.index("note: the task has changed since the run's last start") :]
    assert "--- slope.py (as the run has it)" in told and "-STEEP = 2\n+STEEP = 3\n" in told
    assert "steps 3 to 4 in" in told and "recipe    steps=4  (--set)" in told

    beside.rename(tmp_path / "elsewhere")
    (tmp_path / "run").rename(tmp_path / "moved")
    out = good(tmp_path, "resume", "moved", "--workers", "2", "--set", "steps=6")
    assert "beside/task.py is gone; using the copy that the run keeps, moved/task.py" in out
    assert "steps 5 to 6 in" in out and "everything is in moved" in out
    assert audit(tmp_path / "moved").ok
    told = json.loads(good(tmp_path, "export", "moved", "--out", "line.safetensors", "--json"))
    assert (told["step"], told["tensors"], told["aliases"]) == (6, 4, {})
    assert (tmp_path / "line.safetensors").stat().st_size == told["bytes"]


def test_what_a_killed_run_left_behind_is_no_hindrance_la14(tmp_path: Path) -> None:
    """A killed launcher leaves a lock file, a half-written checkpoint, files not yet renamed, and a store."""
    words = (str(LINE), "--workers", "2", "--set", "how=slow", "--set", "steps=30", "--set", "save_every=2")
    run = tmp_path / "run"
    process = subprocess.Popen(
        [STRETTO, "train", *words, "--run", "run"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not list((run / "checkpoints").glob("step-*/manifest.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (run / ".lock").exists()
    half = run / "checkpoints" / ".step-00000028.partial-1-28"
    half.mkdir()
    (half / "member-m1.safetensors").write_bytes(b"half")
    (run / f".resolved.yaml.{process.pid}").write_text("half")
    out = good(tmp_path, "resume", "run")
    assert "note: checkpoint step-00000028 was never finished" in out
    assert json.loads((run / "summary.json").read_text())["steps"] == 30
    assert audit(run).ok
    assert not half.exists()


def test_fewer_steps_than_are_done_is_one_line(tmp_path: Path) -> None:
    good(tmp_path, "train", str(LINE), "--workers", "1", "--set", "steps=6", "--stop-after", "3", "--run", "run")
    told = one_line(stretto(tmp_path, "resume", "run", "--set", "steps=2"))
    assert "steps=2: this run has committed 3 steps; give more" in told


# ------------------------------------------------------------------------------------------------------- limits


def test_few_open_files_are_enough_or_told_in_one_line(tmp_path: Path) -> None:
    words = ("train", str(LINE), "--workers", "4", "--plan", "dp=4,zero=3", "--set", "save_every=2", "--run")
    with ThreadPoolExecutor() as pool:
        enough = pool.submit(stretto, tmp_path, *words, "enough", files=64)
        few = pool.submit(stretto, tmp_path, *words, "few", files=36)
    assert enough.result().returncode == 0, enough.result().stderr
    told = "the limit on open files is 36, and each of 4 workers may need 40: raise it, as by `ulimit -n 1024`, or ask"
    assert told in one_line(few.result())
    assert not (tmp_path / "few").exists()


def test_a_soft_limit_is_raised_for_all_that_is_started(tmp_path: Path) -> None:
    """And a program that still opens too many is told so in a line."""
    text = LINE.read_text().replace(
        "def data(points: int = 64) -> Dataset[Any]:\n",
        "def data(points: int = 64) -> Dataset[Any]:\n"
        "    import resource\n"
        "    print('files', *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "    kept = [open('/dev/null') for _ in range(100)]\n",
    )
    (tmp_path / "task.py").write_text(text)
    command = f"ulimit -S -n 40; ulimit -H -n 90; exec {STRETTO} train task.py --workers 1 --run run"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "files 90 90\n" in done.stdout
    told = "too many open files while opening /dev/null: the limit is 90; raise it (`ulimit -n`), or close what is"
    assert told in one_line(done)


# --------------------------------------------------------------------------------- folders that can't be written


@contextmanager
def read_only(folder: Path) -> Iterator[bool]:
    """A read-only file system over the folder; where not allowed, the folder's own mode, which binds no root."""
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if not mounted:
        folder.chmod(0o500)
    try:
        yield mounted or os.geteuid() != 0
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
        folder.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = one_line(stretto(tmp_path, "train", str(LINE), "--run", "file/run"))
    assert told == "stretto: cannot make the run folder file/run: Not a directory\n"
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    with read_only(sealed) as binding:
        if binding:
            told = one_line(stretto(tmp_path, "train", str(LINE), "--run", "sealed/run"))
            assert told.startswith("stretto: cannot make the run folder sealed/run: ")
            told = one_line(stretto(sealed, "train", str(LINE)))
            assert told.startswith("stretto: cannot make the run folder runs: ")
