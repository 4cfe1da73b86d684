"""Death is passed down the whole chain, by whatever cause, and nothing that isn't ours is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")

PROGRAM = """
import json, sys
from stretto.elastic.coordinator import Graces
from stretto.launch import Job, LocalLauncher
entry, payload, workers, prepare, preload = json.loads(sys.argv[1])
prepare = prepare and f"launch_entries:{prepare}"
job = Job(f"launch_entries:{entry}", payload, workers, prepare, python_path=(sys.argv[2],))
with LocalLauncher(preload, graces=Graces(1.0, 0.5, 1.0)) as launcher:
    print(json.dumps({"server": launcher._server._process.pid}), flush=True)
    result = launcher.run(job, lambda member, event: print(json.dumps(event), flush=True))
print(json.dumps({"failure": result.failure and str(result.failure), "results": result.results}), flush=True)
sys.exit(result.exit_code)
"""


class Launcher:
    """A launcher in a process of its own, whose whole offspring is known."""

    def __init__(
        self,
        entry: str,
        payload: dict[str, Any],
        workers: int,
        prepare: str | None = None,
        preload: list[str] | None = None,
    ) -> None:
        what = json.dumps([entry, payload, workers, prepare, preload or []])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what, HELPERS], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.server = self.heard()["server"]

    def heard(self) -> dict[str, Any]:
        """The next line that the launcher prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the launcher ended without a word"
        found: dict[str, Any] = json.loads(line)
        return found

    def offspring(self) -> list[int]:
        """All that runs in the server's session: the server, the host, workers, loaders, programs."""
        return [pid for pid, session in sessions() if session == self.server]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def sessions() -> Iterator[tuple[int, int]]:
    """Each running process with its session."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                state, _, _, session = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:
                continue
            if state != "Z":
                yield int(name), int(session)


def gone_within(seconds: float, pids: Callable[[], list[int]]) -> float:
    """How long it takes until none is left; fails after ``seconds``."""
    start = time.monotonic()
    while left := pids():
        assert time.monotonic() - start < seconds, f"orphans after {seconds} s: {left}"
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def launch() -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*arguments: Any, **more: Any) -> Launcher:
        started.append(Launcher(*arguments, **more))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_launcher_leaves_nothing(launch: Callable[..., Launcher], stopped: bool) -> None:
    """Two workers, one of them stopped or none, each with two loader workers and a program.

    Both, because the kernel hangs up on an orphaned group only where one of it is stopped.
    """
    launcher = launch("descendants", {}, 2, preload=["torch.utils.data"])
    workers = [launcher.heard()["pid"] for _ in range(2)]
    family = launcher.offspring()
    assert len(family) >= 2 + 2 * 4, f"server, host, and two of worker, two loaders, program: {family}"
    if stopped:
        os.kill(workers[0], signal.SIGSTOP)
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    launcher.process.kill()
    took = gone_within(2.0, launcher.offspring)
    print(f"{len(family)} processes gone {took:.3f} s after the launcher")
    assert bystander.poll() is None, "one that isn't ours was ended"
    bystander.kill()
    bystander.wait()


@pytest.mark.parametrize("stopped", ["server", "host", "all"])
def test_a_killed_launcher_leaves_nothing_though_the_chain_is_stopped(
    launch: Callable[..., Launcher], stopped: str
) -> None:
    launcher = launch("deaf_to_stop", {}, 2)
    first, second = launcher.heard(), launcher.heard()
    every = [launcher.server, first["host"], first["pid"], second["pid"]]
    assert sorted(launcher.offspring()) == sorted(every)
    for pid in {"server": every[:1], "host": every[1:2], "all": every}[stopped]:
        os.kill(pid, signal.SIGSTOP)
    launcher.process.kill()
    gone_within(2.0, launcher.offspring)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_a_launcher_killed_early_leaves_nothing(launch: Callable[..., Launcher], delay: float) -> None:
    """While the server imports, and while the host prepares."""
    launcher = launch("where", {}, 2, prepare="prepare_sleep", preload=["torch"] if delay < 0.3 else [])
    time.sleep(delay)
    launcher.process.kill()
    gone_within(2.0, launcher.offspring)


def test_a_killed_worker_takes_its_own_along_and_is_named(launch: Callable[..., Launcher]) -> None:
    launcher = launch("descendants", {}, 2, preload=["torch.utils.data"])
    ready = launcher.heard()
    launcher.heard()
    os.kill(ready["pid"], signal.SIGKILL)
    told = launcher.heard()
    assert "was killed by signal 9 (SIGKILL)" in told["failure"] and "rank" in told["failure"]
    assert launcher.process.wait(10) == 137
    assert launcher.offspring() == []


def test_the_loaders_of_a_killed_worker_end_while_the_job_goes_on(launch: Callable[..., Launcher]) -> None:
    launcher = launch("descendants", {}, 2, preload=["torch.utils.data"])
    ready = launcher.heard()
    launcher.heard()
    children = Path(f"/proc/{ready['pid']}/task/{ready['pid']}/children").read_text().split()
    loaders = [int(pid) for pid in children if int(pid) != ready["program"]]
    assert len(loaders) == 2
    os.kill(ready["pid"], signal.SIGKILL)
    # The other worker is deaf for 1.5 s more, so this is not the end of the job's doing.
    gone_within(0.5, lambda: [pid for pid, _ in sessions() if pid in loaders])
    assert launcher.process.poll() is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_lets_workers_save(
    launch: Callable[..., Launcher], tmp_path: Path, number: int, code: int
) -> None:
    launcher = launch("until_stopped", {"folder": str(tmp_path)}, 2)
    launcher.heard(), launcher.heard()
    launcher.process.send_signal(number)
    assert launcher.heard() == {"failure": None, "results": {"m1": {"stopped": True}, "m2": {"stopped": True}}}
    assert launcher.process.wait(10) == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-m1", "saved-m2"]
    assert launcher.offspring() == []


def test_the_second_interrupt_ends_it_at_once_la04(launch: Callable[..., Launcher]) -> None:
    launcher = launch("deaf_to_stop", {}, 2)
    launcher.heard(), launcher.heard()
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert launcher.process.poll() is None, "the first one waits for the workers' safe point"
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(2) == 130
    assert launcher.offspring() == []


def test_an_interrupt_while_preparing_ends_it_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("where", {}, 2, prepare="prepare_sleep")
    launcher.heard()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(2) == 130
    assert launcher.offspring() == []


def test_an_interrupt_while_the_server_imports_ends_it(launch: Callable[..., Launcher]) -> None:
    launcher = launch("where", {}, 2, preload=["torch._dynamo"])
    time.sleep(0.1)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(5) == 130
    assert launcher.offspring() == []


def test_a_host_that_is_killed_takes_its_workers_along(launch: Callable[..., Launcher]) -> None:
    launcher = launch("deaf_to_stop", {}, 2)
    ready = launcher.heard()
    launcher.heard()
    os.kill(ready["host"], signal.SIGKILL)
    assert "host was killed by signal 9" in launcher.heard()["failure"]
    assert launcher.process.wait(5) == 137
    assert launcher.offspring() == []
