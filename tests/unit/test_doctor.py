"""What makes jobs fail is found and said with what to do; what was measured is read back as it was."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.plan_task import parse_bytes
from stretto.cluster import Cluster
from stretto.doctor import checks as looked
from stretto.doctor.checks import Check, checks
from stretto.doctor.examine import Host, read_known
from stretto.errors import UserError
from stretto.planner.tables import LinkTable

EPOCH = time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0))
TABLE = LinkTable("gloo", True, {("all_reduce", 2, 1): ((64, 1e-4), (4096, 2e-4)), ("message", 2, 1): ((64, 5e-5),)})


def found(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in checks(2, folder)}


def test_a_sound_host_has_nothing_to_mend(tmp_path: Path) -> None:
    every = found(tmp_path / "runs" / "not-there-yet")
    assert {name for name, check in every.items() if not check.passed} <= {"disk", "name resolution"}
    assert set(every) >= {"versions", "shared memory", "open files", "network interface", "ports", "clock", "disk"}


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(111, "Connection refused")


@pytest.mark.parametrize(
    ("name", "where", "what", "says"),
    [
        ("versions", "version", lambda _: "2.4.1+cpu", "stretto needs torch 2.11 or newer"),
        ("open files", "check_open_files", None, "ask for fewer workers"),
        ("ports", "socket.create_connection", refuse, "look at the firewall"),
        ("name resolution", "socket.getaddrinfo", refuse, "to /etc/hosts"),
        ("clock", "time.gmtime", lambda: EPOCH, "set the clock"),
        ("disk", "os.access", lambda *_: False, "give --run a folder that can"),
        ("network interface", "check_interface", None, "unset GLOO_SOCKET_IFNAME"),
    ],
)
def test_each_check_can_fail_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str, what: Any, says: str
) -> None:
    if where == "check_open_files":
        monkeypatch.setattr("stretto.launch.limits.resource.getrlimit", lambda _: (20, 20))
    elif where == "check_interface":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    else:
        holder, _, attribute = where.rpartition(".")
        monkeypatch.setattr(getattr(looked, holder) if holder else looked, attribute, what)
    check = found(tmp_path)[name]
    assert not check.passed and says in check.mend, check


def test_an_interface_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.if_nameindex()[0][1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert found(tmp_path)["network interface"].passed


def test_the_cluster_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    host = Host(2, Cluster(cores=2, memory_bytes=1 << 34), (Check("a", "b"),), {"fp32": {"64": 1e9}}, 1e10, TABLE)
    host.write(tmp_path / "host.yaml")
    known = read_known(tmp_path / "host.yaml")
    assert known.workers == 2 and known.links.to_json() == TABLE.to_json() and known.room is None
    with pytest.raises(UserError, match="can't be written"):
        host.write(tmp_path / "no" / "folder.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2", "is no YAML"),
        ("workers: 2", "memory_bytes: field required"),
        ("workers: 0\nmemory_bytes: 1\nlinks: {}", "workers: input should be greater than or equal to 1"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_known(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="can't be read: No such file"):
        read_known(tmp_path / "none.yaml")


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("2GiB", "500MB", "1.5g", "7B")] == [2**31, 5e8, 1.5e9, 7]
    for text in ("", "2", "GB", "0MB", "1.2.3G", "-1GB"):
        with pytest.raises(UserError, match="expected a size such as 2GiB"):
            parse_bytes(text)
