"""The commands as a person uses them: real processes, their output, their exit codes, the folders they leave."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stretto.runfolder import FolderLock

ROOT = Path(__file__).resolve().parents[2]
STRETTO = str(Path(sys.executable).parent / "stretto")
DIGITS = str(ROOT / "examples" / "digits")
LINE = str(ROOT / "tests" / "tasks" / "line.py")
GPT = (
    str(ROOT / "examples" / "gpt"),
    *(word for each in ("depth=2", "width=32", "context=16", "heads=2") for word in ("--set", each)),
    *(
        word
        for each in ("steps=8", "batch=8", "eval_batch=1024", "eval_every=8", "precision=fp64")
        for word in ("--set", each)
    ),
)
HELP_SECONDS = 0.4

pytestmark = pytest.mark.timeout(150)  # a first start loads torch from a cold disk


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object that standard output holds."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def stretto(folder: Path, *words: str) -> Done:
    done = subprocess.run([STRETTO, *words], cwd=folder, capture_output=True, text=True, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def good(folder: Path, *words: str) -> Done:
    done = stretto(folder, *words)
    assert done.code == 0, done.out + done.err
    return done


# --------------------------------------------------------------------------------------- stop, go on, audit


@dataclass(frozen=True)
class Story:
    """A run that was stopped twice and went on with other workers and plans, and one that never was."""

    folder: Path
    first: Done
    second: Done
    last: Done
    undisturbed: Done


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    with ThreadPoolExecutor() as pool:  # imports take most of the time, and one core each
        undisturbed = pool.submit(good, folder, "train", *GPT, "--workers", "1", "--json")
        first = good(folder, "train", *GPT, "--workers", "2", "--stop-after", "3", "--run", "run", "--json")
        second = good(folder, "resume", "run", "--plan", "dp=3,zero=3", "--stop-after", "5")
        last = good(folder, "resume", "run", "--workers", "1", "--json")
    return Story(folder, first, second, last, undisturbed.result())


def test_json_is_the_summary_and_nothing_else(story: Story) -> None:
    summary = story.first.json
    kept = {"final_loss", "steps", "samples", "wall_seconds", "plan", "world_size", "peak_bytes"}
    assert kept <= set(summary)
    assert (summary["steps"], summary["samples"], summary["plan"], summary["world_size"]) == (3, 24, "dp=2", 2)
    assert summary["finished"] is False
    assert summary["peak_bytes"] > 0
    assert story.first.err == ""
    assert story.last.json["finished"] is True
    assert json.loads((story.folder / "run" / "summary.json").read_text()) == story.last.json


def test_other_workers_and_plans_give_the_numbers_of_one_device(story: Story) -> None:
    assert story.last.json["plan"] == "dp=1,zero=3"  # all but the workers is as before
    assert story.last.json["final_loss"] == pytest.approx(story.undisturbed.json["final_loss"], rel=1e-12)
    assert story.last.json["evaluation"]["bits_per_byte"] == pytest.approx(
        story.undisturbed.json["evaluation"]["bits_per_byte"], rel=1e-12
    )


def test_the_audit_of_the_stopped_run_is_clean(story: Story) -> None:
    report = good(story.folder, "audit", "run", "--json").json
    assert report["ok"] is True
    assert report["epochs"] == [{"epoch": 0, "expected": 64, "seen": 64, "missing": 0, "repeated": 0}]
    starts = [json.loads(line) for line in (story.folder / "run/ledger/starts.jsonl").read_text().splitlines()]
    assert [start["attempt"] for start in starts] == [1, 2, 3]
    assert [start["members"] for start in starts] == [["m1", "m2"], ["m3", "m4", "m5"], ["m6"]]


def test_a_dirty_audit_ends_with_1(story: Story, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    for path in (story.folder / "run" / "ledger").iterdir():
        text = path.read_text()
        (ledger / path.name).write_text(text.replace('"ids":[', '"ids":[0,') if "m6" in path.name else text)
    done = stretto(tmp_path.parent, "audit", str(tmp_path))
    assert done.code == 1
    assert "sample 0 came 3 times" in done.out or "sample 0 came 4 times" in done.out


def test_the_plan_is_shown_with_origins_in_twelve_lines(story: Story) -> None:
    lines = story.second.out.splitlines()
    assert lines[0] == "starting 3 workers ..."
    begin, end = lines.index("", 1), lines.index("", 2)
    assert begin == 1
    plan = lines[2:end]
    assert len(plan) <= 12
    sections = [line.split()[0] for line in plan if line[0] != " "]
    assert sections == ["task", "settings", "recipe", "plan", "cluster", "run"]
    assert "settings  depth=2 width=32 heads=2 context=16  (--set)" in plan  # where it came from at first
    assert "plan      dp=3 zero=3  (--plan)" in plan
    assert any(line.endswith("(measured)") for line in plan)


def test_the_report_ends_with_what_to_try_next(story: Story) -> None:
    tail = story.second.out[story.second.out.index("stopped after step 5 of 8") :]
    commands = tail[tail.index("\nNext:\n") :]
    assert re.search(r"^  stretto resume run +# ", commands, re.MULTILINE)
    assert re.search(r"^  stretto resume run --workers 1 +# ", commands, re.MULTILINE)
    assert re.search(r"^  stretto audit run +# ", commands, re.MULTILINE)
    assert re.search(r"^  stretto verify \S*examples/gpt --plan dp=3,zero=3 --set depth=2", commands, re.MULTILINE)


def test_a_finished_run_says_so(story: Story) -> None:
    done = good(story.folder, "resume", "run")
    assert done.out == "run is finished: all 8 steps are done\n"


def test_the_folders_of_two_runs_differ(story: Story) -> None:
    assert Path(story.undisturbed.json["run"]) == Path("runs/gpt")
    assert (story.folder / "runs" / "gpt" / "checkpoints" / "step-00000008" / "manifest.json").is_file()


# ----------------------------------------------------------------------------------------- what one sees


def test_digits_show_progress_and_the_held_out_table(tmp_path: Path) -> None:
    sets = (word for each in ("steps=40", "eval_every=20", "width=8") for word in ("--set", each))
    done = good(tmp_path, "train", DIGITS, *sets, "--workers", "2", "--run", "run")
    steps = [line for line in done.out.splitlines() if line.startswith("step ") and "/40  loss " in line]
    assert 5 <= len(steps) <= 14  # each tenth of the steps
    assert all(re.search(r"[\d,.]+ samples/s", line) for line in steps[2:])
    assert re.search(r"^step 20  held out: loss [\d.]+  accuracy [\d.]+$", done.out, re.MULTILINE)
    table = re.search(r"^held out +step 40\nloss +[\d.]+\naccuracy +([\d.]+)\n", done.out, re.MULTILINE)
    assert table is not None
    assert float(table[1]) > 0.5
    assert re.search(r"^40 steps in [\d.]+ s, 2,\d\d\d samples, last loss [\d.]+, peak memory \d+ MiB", done.out, re.M)
    assert "\x1b" not in done.out


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ("train", LINE, "--workers", "2", "--set", "steps=100000", "--set", "how=slow", "--run", "run")
    code, screen = on_a_terminal(tmp_path, words, until=" left", keys=b"\x03")
    assert code == 130
    assert screen.startswith("starting 2 workers ...")
    assert re.search(r"step +\d+/100,000 +━+ +loss [\d.]+ +[\d.,]+ samples/s +[\d:]+ left", screen)
    assert "stopping after step" in screen
    assert re.search(r"stopped after step \d+ of 100,000", screen)
    assert screen.index("Next:") < screen.index("stretto resume run")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


def on_a_terminal(folder: Path, words: tuple[str, ...], until: str, keys: bytes) -> tuple[int, str]:
    """Runs a command on a terminal of its own, types ``keys`` once it shows ``until``; exit code and plain output."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(STRETTO, [STRETTO, *words], {**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    shown, typed, deadline = b"", False, time.monotonic() + 100
    while time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if not data:
                break
            shown += data
        if not typed and until.encode() in shown:
            typed = True
            os.write(fd, keys)
    os.close(fd)
    _, status = os.waitpid(pid, 0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))
    return os.waitstatus_to_exitcode(status), plain.replace("\r", "")


@pytest.mark.alone
def test_help_starts_at_once() -> None:
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        done = subprocess.run([STRETTO, "--help"], capture_output=True, timeout=50)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0
    assert min(seconds) < HELP_SECONDS, seconds


def test_the_package_is_a_command_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert re.fullmatch(r"stretto \d+\.\d+\.\d+\n", done.stdout)


# -------------------------------------------------------------------------------------- mistakes cost a line


def one_line_of(done: Done, code: int = 2) -> str:
    assert done.code == code, done.out + done.err
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.out + done.err
    return done.err.strip()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run that is in use, one that never saved, one that is no run, and a task."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "line.py").write_text(Path(LINE).read_text())
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("dear")
    for name in ("busy", "unsaved"):
        (folder / name).mkdir()
        (folder / name / "resolved.yaml").write_text(
            f"name: line\ntask: {folder / 'line.py'}\nsettings: {{}}\nrecipe: {{}}\nplan: {{}}\ncluster: {{}}\n"
        )
    lock = FolderLock(folder / "busy")
    yield folder
    lock.release()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "lines.py"), "task: no file lines.py; did you mean 'line.py'?"),
        (("train", "full"), "the folder full holds no task.py"),
        (("train", "full/letter.txt"), "full/letter.txt is no Python file; expected TASK.py, or a folder that holds"),
        (("train", "."), "the folder . holds no task.py; there is line.py"),
        (("train", "fulll/task.py"), "no folder fulll; did you mean 'full'?"),
        (
            ("train", "line.py", "--plan", "pd=2"),
            "unknown key 'pd'; valid: dp, zero, microbatches, ",
        ),
        (("train", "line.py", "--workers", "3", "--plan", "dp=2"), "plan dp=2 needs 2 worker(s), got --workers 3"),
        (("train", "line.py", "--set", "steps"), "expected --set KEY=VALUE"),
        (("train", "line.py", "--set", "lr=1", "--set", "lr=2"), "--set lr is given twice"),
        (("train", "line.py", "--run", "busy"), "busy is in use by process"),
        (("train", "line.py", "--run", "unsaved"), "unsaved holds a run already: `stretto resume unsaved`"),
        (("train", "line.py", "--run", "full"), "full is not empty and no run"),
        (("train", "line.py", "--wrokers", "2"), "no option --wrokers; did you mean '--workers'?"),
        (("train", "line.py", "--workers", "0"), "--workers"),
        (("train",), "missing argument"),
        (("tran",), "no such command 'tran'. Did you mean 'train'?"),
        (("resume", "busy"), "busy is in use by process"),
        (("resume", "unsaved"), "unsaved holds no checkpoint to go on from"),
        (("resume", "unsavd"), "unsavd is no run folder: it holds no resolved.yaml; did you mean 'unsaved'?"),
        (("run", "lin.py"), "no script lin.py; did you mean 'line.py'?"),
        (("resume", "unsaved", "--set", "lr=1"), "--set lr: this run has no such setting"),
        (("export", "full"), "full is no run folder"),
        (("export", "unsaved"), "no checkpoint in unsaved/checkpoints"),
        (("audit", "full"), "full holds no ledger"),
        (("verify", "lin.py", "--plan", "dp=2"), "did you mean 'line.py'?"),
    ],
)
def test_a_mistake_costs_one_line(room: Path, words: tuple[str, ...], says: str) -> None:
    assert says in one_line_of(stretto(room, *words))
    assert not (room / "runs").exists()  # nothing was begun


def test_a_misspelt_setting_costs_one_line_and_the_launcher_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import stretto.cli.display, stretto.cli.launching, stretto.launch, stretto.order, stretto.preload\n"
        "loaded = [name for name in ('torch', 'pydantic') if name in sys.modules]\n"  # Typer itself may load pydantic
        "from stretto.cli.main import main\n"
        f"code = main(['train', {LINE!r}, '--set', 'widht=3'])\n"
        "print(loaded, 'torch' in sys.modules)\nsys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    done = Done(ended.returncode, ended.stdout, ended.stderr)
    assert "--set widht: no such setting; did you mean 'width'?" in one_line_of(done)
    assert done.out == "looking for a plan ...\n[] False\n"
    assert list(tmp_path.glob("runs/*")) == []  # a folder in which nothing was begun is taken away again


def test_a_traceback_is_printed_last_with_rank_and_coordinates(tmp_path: Path) -> None:
    sets = ("--set", "how=raise", "--set", "save_every=1")
    done = stretto(tmp_path, "train", LINE, "--workers", "2", *sets, "--run", "run")
    assert done.code == 1
    assert done.err.endswith("RuntimeError: a planted fault\n")
    begin = done.err.index("rank 1 (member m2, dp_replicate=1) failed:\nTraceback (most recent call last):\n")
    assert done.err.count("Traceback") == 1
    assert "in loss" in done.err[begin:]
    assert "go on with: stretto resume run\n" in done.err[:begin]
    assert "Next:" not in done.out


def test_an_exit_code_of_the_task_is_kept(tmp_path: Path) -> None:
    done = stretto(tmp_path, "train", LINE, "--workers", "2", "--set", "how=exit", "--run", "run", "--json")
    assert done.code == 7
    assert done.out == ""
    assert done.err == "rank 1 (member m2, dp_replicate=1) failed:\nsys.exit(7) was called\n"


# ------------------------------------------------------------------------------------------------- verify


def test_verify_of_right_plans(tmp_path: Path) -> None:
    done = good(tmp_path, "verify", LINE, "--plan", "dp=2", "--plan", "cp=2", "--steps", "2", "--json")
    assert done.json["passed"] is True
    assert [plan["status"] for plan in done.json["plans"]] == ["passed", "refused"]
    assert done.json["plans"][0]["grad_max_rel"] <= 1e-13


def test_verify_of_numbers_that_depend_on_the_rank(tmp_path: Path) -> None:
    done = stretto(tmp_path, "verify", LINE, "--plan", "dp=2", "--plan", "cp=2", "--set", "how=by rank")
    assert done.code == 1, done.out + done.err
    assert re.search(r"^dp=2 +failed +\d", done.out, re.MULTILINE)
    assert re.search(r"^ +first: step 1: loss\b", done.out, re.MULTILINE)
    assert re.search(r"^cp=2 +refused\n +plan: cp is planned but not built yet", done.out, re.MULTILINE)
    assert "1 failed, 1 refused" in done.out
