"""scripts/lanes.py: every test runs once, those marked ``alone`` with nothing beside them, and no failure is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LANES = ROOT / "scripts" / "lanes.py"
FOLDERS = ("chaos", "dist", "e2e", "new", "parity", "unit")
# Each test writes when it begins and when it ends. The two lanes' first tests wait for each other.
TEST = """
import time, pathlib, pytest

def note(word):
    with open("{log}", "a") as file:
        file.write(word + "\\n")

def seen(word):
    return word in pathlib.Path("{log}").read_text().split("\\n")

def test_one():
    note("begin {name}")
    {meet}
    note("end {name}")

@pytest.mark.alone
def test_two():
    note("begin alone {name}")
    note("end alone {name}")

@pytest.mark.matrix
def test_three():
    note("begin matrix {name}")
"""
MEET = """
    for _ in range(1000):
        if seen("begin {other}"): break
        time.sleep(0.01)
    else:
        raise AssertionError("the other lane did not run beside this one")
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A tree of small tests, in the folders of the real ones and in a new one."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nnorecursedirs = .*\nmarkers =\n  alone\n  matrix\n  chaos\n")
    for name in FOLDERS:
        (tmp_path / "tests" / name).mkdir(parents=True)
        other = {"dist": "parity", "parity": "dist"}.get(name)
        meet = MEET.format(other=other).strip() if other else ""
        test = TEST.format(name=name, log=tmp_path / "log", meet=meet)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(test)
    return tmp_path


def plant(room: Path, folder: str, line: str, test: str = "test_one") -> None:
    path = room / "tests" / folder / f"test_{folder}.py"
    path.write_text(path.read_text().replace(f"def {test}():\n", f"def {test}():\n    {line}\n"))


def lanes(room: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they cost a second a start
    deaf = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as a shell starts what runs in the background
    command = [*deaf, sys.executable, str(LANES), "-p", "no:cacheprovider"]
    return subprocess.Popen(
        command, cwd=room, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_every_test_runs_once_those_that_measure_alone_and_a_failure_is_the_end(room: Path) -> None:
    plant(room, "e2e", "note('failing'); assert False, 'planted'")
    process = lanes(room)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 1, out
    assert "FAILED tests/e2e/test_e2e.py::test_one - AssertionError: planted" in out
    log = (room / "log").read_text().splitlines()
    ends = [f"end {name}" for name in FOLDERS if name != "e2e"] + [f"end alone {name}" for name in FOLDERS]
    assert sorted(line for line in log if "end" in line) == sorted(ends), out
    assert log.count("failing") == 1 and not any("matrix" in line for line in log), "`make matrix` runs the rest"
    first_alone = next(number for number, line in enumerate(log) if "alone" in line)
    assert all("alone" in line for line in log[first_alone:])
    assert out.index("lane 1 of 2") < out.index("tests/new/") < out.index("lane 2 of 2,") < out.index("tests/parity/")


def test_an_interrupt_ends_both_lanes_and_shows_what_they_found(room: Path) -> None:
    for folder in ("dist", "parity"):
        plant(room, folder, "note(f'pid {__import__(\"os\").getpid()}'); time.sleep(60)")
    process = lanes(room)
    log = room / "log"
    while not log.exists() or log.read_text().count("pid ") < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.count("KeyboardInterrupt") >= 2 and "tests/parity/" in out
    for line in log.read_text().splitlines():
        if line.startswith("pid "):
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.removeprefix("pid ")), 0)
