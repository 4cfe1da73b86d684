"""`stretto doctor --hosts`: two hosts on the loopback, and two network namespaces with a slow link between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = ("--hosts", "a=127.0.0.1,b=127.0.0.1", "--reach", "env STRETTO_HOST={host}", "--workers", "1")

pytestmark = pytest.mark.timeout(150)  # a first start loads torch from a cold disk


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", "doctor", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=140)


def of_ours(mark: str) -> list[str]:
    """Processes that have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.matrix  # half a minute; what ends with the near side is looked at every day
def test_two_hosts_are_looked_at_and_measured_and_nothing_is_left_on_them(tmp_path: Path) -> None:
    done = doctor(tmp_path, *LOOPBACK, "-o", "cluster.yaml", "--json")
    found = json.loads(done.stdout)
    checks = {check["name"]: check["passed"] for check in found["checks"]}
    assert checks["a to b"] and checks["b to a"] and checks["hosts: torch"] and checks["b: way to a"]
    assert checks["b: clock beside this host's"] and "a: disk" in checks
    kept = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    assert [host["name"] for host in kept["hosts"]] == ["a", "b"] and kept["links"] == found["links"]
    assert {(one["kind"], one["hosts"]) for one in kept["links"]["curves"]} >= {("all_reduce", 2), ("message", 2)}
    assert kept["links"]["background"] and kept["hosts"][0]["interface"] == "lo"
    assert not of_ours("STRETTO_HOST=")


def test_what_was_started_there_ends_when_the_near_side_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "doctor", *LOOPBACK[:3], "env STRETTO_KILLED={host}", *LOOPBACK[4:]]
    near = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(of_ours("STRETTO_KILLED=")) < 4 and time.monotonic() < until:  # two hosts, a worker of each
        time.sleep(0.05)
    assert len(of_ours("STRETTO_KILLED=")) == 4
    near.send_signal(signal.SIGKILL)
    near.wait()
    until = time.monotonic() + 5
    while (left := of_ours("STRETTO_KILLED=")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


@pytest.mark.matrix  # its parts are tested each for itself
def test_hosts_that_do_not_meet_are_not_measured(tmp_path: Path) -> None:
    """The address of b is nobody's: documentation's own net."""
    done = doctor(tmp_path, "--hosts", "a=127.0.0.1,b=192.0.2.77", *LOOPBACK[2:], "-o", "cluster.yaml")
    assert done.returncode == 1, done.stderr
    assert "MEND  b: listening at 192.0.2.77" in done.stdout and "cluster.yaml was not written" in done.stdout
    assert not (tmp_path / "cluster.yaml").exists()


@pytest.fixture
def two_hosts() -> Iterator[None]:
    script = str(ROOT / "scripts" / "two_hosts.sh")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if Path("/run/netns/stretto0").exists():
        pytest.skip("somebody uses the namespaces of scripts/two_hosts.sh")
    up = subprocess.run([script, "up", "200mbit"], capture_output=True, text=True)
    if up.returncode:
        pytest.skip(f"no network namespaces here: {up.stderr.strip()}")
    yield
    subprocess.run([script, "down"], check=True)


@pytest.mark.matrix  # the loopback's test runs the same code
def test_two_namespaces_and_the_link_between_them_are_measured(tmp_path: Path, two_hosts: None) -> None:
    words = ("--hosts", "stretto0=10.77.0.1,stretto1=10.77.0.2", "--reach", "ip netns exec {host}", "--workers", "1")
    found = json.loads(doctor(tmp_path, *words, "--json").stdout)
    assert [host["interface"] for host in found["hosts"]] == ["stretto0", "stretto1"]
    (pair,) = found["links"]["pairs"]
    rate = 8 * pair["bytes"][-1] / pair["seconds"][-1]
    assert 0.16e9 < rate < 0.22e9, "a link of 200 Mbit/s"
    assert 0.005 < found["links"]["burst_seconds"] < 0.015, "its bucket holds 256 kB, which is 10 ms"
