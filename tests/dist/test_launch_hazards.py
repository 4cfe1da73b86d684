"""What breaks other launchers: signals that nobody hears, errors that hide each other, torn output, names of hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hazard_entries import LINES, WIDTH
from runs import Starter, short_of_grace
from stretto.elastic.coordinator import Graces
from stretto.errors import LaunchError
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.observe.events import read_lines

ROOT = Path(__file__).resolve().parents[2]
HELPERS = str(ROOT / "tests" / "helpers")
SMALL = ROOT / "tests" / "tasks" / "small_parts.py"
LINE = ROOT / "tests" / "tasks" / "line.py"
STRETTO = str(Path(sys.executable).parent / "stretto")
SHORT = Graces(1.0, 0.5, 1.0, stop_seconds=0.5)


@pytest.fixture(scope="module")
def launcher(launcher: LocalLauncher) -> Iterator[LocalLauncher]:
    with short_of_grace(launcher, SHORT):
        yield launcher


def job(entry: str, workers: int, **payload: Any) -> Job:
    module = "launch_entries" if entry == "gloo" else "hazard_entries"
    return Job(f"{module}:{entry}", payload, workers, python_path=(HELPERS,))


# ------------------------------------------------------------------------------------------------- signals


def signalled(launcher: LocalLauncher, *signals: int) -> tuple[JobResult, float]:
    """Sends this process the signals once all workers wait, a little apart; the result, and seconds to the end."""
    began: list[float] = []
    pids: list[int] = []

    def listen(member: str, event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        if len(pids) == 3:
            began.append(time.monotonic())
            for place, number in enumerate(signals):
                threading.Timer(0.3 * place, os.kill, (os.getpid(), number)).start()

    result = launcher.run(job("deaf_while_others_wait", 3), listen)
    seconds = time.monotonic() - began[0]
    while any(map(alive, pids)):
        assert time.monotonic() - began[0] < seconds + 1.0, "left running"
        time.sleep(0.01)
    return result, seconds


def alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and waits for its parent's glance does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.alone
def test_two_interrupts_end_ranks_that_sleep_in_a_collective_la04(launcher: LocalLauncher) -> None:
    result, seconds = signalled(launcher, signal.SIGINT, signal.SIGINT)
    assert (result.exit_code, result.failure) == (130, None)
    assert seconds < 2.5


@pytest.mark.alone
def test_one_sigterm_that_nobody_hears_ends_them_too_and_is_told_la04(launcher: LocalLauncher) -> None:
    result, seconds = signalled(launcher, signal.SIGTERM)
    assert result.exit_code == 143 and result.failure is not None
    assert str(result.failure).startswith("the workers came to no safe point within 0.5 s of SIGTERM")
    assert seconds < 0.5 + 1.0 + 0.5 + 2.0, "each grace, and a little"


# ------------------------------------------------------------------------------------------ what is told of an end


def test_lines_are_whole_and_the_first_cause_is_one_block_at_the_end_la12_la08(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    asked = job("talkative", 4)
    shown: list[str] = []
    result = launcher.run(
        Job(asked.entry, {}, 4, python_path=asked.python_path, log_dir=tmp_path), on_output=shown.append
    )
    for rank in range(4):
        lines = (tmp_path / f"member-m{rank + 1}.log").read_text().splitlines()
        expected = {f"rank {rank} line {number} {str(rank) * WIDTH} end" for number in range(LINES)}
        assert set(lines[:LINES]) == expected, "each rank has a log of its own, and each line is whole"
    terminal = "".join(shown)
    assert re.fullmatch(rf"(rank 0 line \d+ 0{{{WIDTH}}} end\n){{{LINES}}}", terminal), "the terminal shows one rank's"
    assert result.failure is not None and result.failure.rank == 2
    told = str(result.failure)
    assert told.startswith("rank 2 (member m3) failed:\nTraceback") and told.endswith("ValueError: the first cause")
    assert told.count("Traceback") == 1 and "a later cause" not in told


@pytest.mark.parametrize("front", ["python", "shell", "module"])
def test_an_error_of_one_rank_is_non_zero_through_every_layer_la02(
    launcher: LocalLauncher, tmp_path: Path, front: str
) -> None:
    if front == "python":
        result = Starter(launcher).start(tmp_path / "run", SMALL, "dp=2", how="memory")
        assert result.exit_code == 1 and result.failure is not None and result.failure.rank == 1
        told = str(result.failure)
    else:
        words = f"train {SMALL} --workers 2 --set how=memory --run {tmp_path / 'run'}"
        command = f"{STRETTO} {words}" if front == "shell" else f"{sys.executable} -m stretto {words}"
        done = subprocess.run(["sh", "-c", f"sh -c '{command}'"], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        told = done.stderr
    assert told.count("Traceback (most recent call last)") == 1
    assert told.rstrip().endswith("MemoryError: a planted one")


def test_a_loss_that_one_rank_does_not_give_is_one_line_and_no_hang_hg15(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    began = time.monotonic()
    result = Starter(launcher).start(tmp_path / "run", SMALL, "dp=2", how="nothing")
    assert result.exit_code == 2 and result.failure is not None and result.failure.rank == 1
    assert str(result.failure) == "task: loss must return the pair (sum, weight), got NoneType"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_that_only_one_rank_follows_holds_nobody_up_hg17(
    launcher: LocalLauncher, tmp_path: Path, fails: bool
) -> None:
    run = tmp_path / "run"
    began = time.monotonic()
    result = launcher.run(job("own_loop", 2, task=str(LINE), run=str(run), fails=fails))
    assert time.monotonic() - began < 20
    seen = [line["seen"] for line in read_lines(run / "events" / "member-m1.jsonl") if line["kind"] == "log"]
    if fails:
        assert result.exit_code == 1 and result.failure is not None and result.failure.rank == 0
        assert "ArithmeticError: in a hook of rank 0" in str(result.failure)
        assert seen == [1, 2]
    else:
        assert result.exit_code == 0 and seen == list(range(1, 9))


# -------------------------------------------------------------------------------------------- ports and interfaces


def test_jobs_at_one_time_do_not_meet_rs01(launcher: LocalLauncher) -> None:
    """No port is chosen: the workers of a job meet in a folder of their own."""
    with LocalLauncher(["torch.distributed"]) as other, ThreadPoolExecutor() as pool:
        for _ in range(5):
            found = pool.map(lambda each: each.run(job("gloo", 2)), (launcher, other))
            assert [result.exit_code for result in found] == [0, 0]


PROGRAM = """
import json, socket, sys
from stretto.launch import Job, LocalLauncher
with LocalLauncher(["torch.distributed"]) as launcher:
    result = launcher.run(Job("launch_entries:gloo", {}, 2, python_path=(sys.argv[1],)))
print(json.dumps([socket.gethostname(), result.exit_code, str(result.failure)]))
"""


def test_a_host_without_a_name_that_leads_anywhere_trains_all_the_same_la06() -> None:
    """In a namespace where the host's name can't be resolved; where that isn't allowed, on the host as it is."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"]
    allowed = subprocess.run([*rename, "true"], capture_output=True).returncode == 0
    words = [*(rename if allowed else []), sys.executable, "-c", PROGRAM, HELPERS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f'"{"nowhere.invalid" if allowed else ""}' in done.stdout
    assert done.stdout.endswith('0, "None"]\n'), done.stdout


def test_an_interface_is_heeded_where_it_is_named_and_a_wrong_one_is_one_line_la06(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(LaunchError, match=r"^GLOO_SOCKET_IFNAME: no interface 'eth99'.*; available: .*lo"):
        launcher.run(job("gloo", 2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")  # a spelling that only a person would choose
    with LocalLauncher() as named:
        found = named.run(Job("launch_entries:where", {}, 1, python_path=(HELPERS,))).results["m1"]
    assert found is not None and found["environment"]["GLOO_SOCKET_IFNAME"] == "lo,lo"
