"""Several hosts: what is wrong between them is said with how to mend it; their file tells the planner of all."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stretto.comm.group import Group, Rendezvous
from stretto.doctor.examine import read_known
from stretto.doctor.far import meet
from stretto.doctor.hosts import Examined, FoundHost, _interface, connect, meetings, versions
from stretto.errors import LaunchError, UserError
from stretto.launch.interface import interface_to
from stretto.launch.reach import SSH, Place, command
from stretto.planner.tables import LinkTable

A, B = Place("a", "10.0.0.1"), Place("b", "bee")
CURVES = {("all_reduce", 2, 2): ((64, 1e-3),), ("message", 2, 2): ((64, 2e-3),)}
LINKS = LinkTable("gloo", True, CURVES, per_host=2, pairs={(0, 1): ((64, 2e-3),)})


def test_hosts_are_named_with_or_without_an_address() -> None:
    assert Place.parse("a=10.0.0.1, b") == (A, Place("b", "b"))
    for text, says in (("a,,b", "expected NAME"), ("a=", "expected NAME"), ("a,a", "twice"), ("-oX,b", "an option")):
        with pytest.raises(UserError, match=says):
            Place.parse(text)


def test_words_go_to_a_shell_only_where_ssh_gives_them_to_one() -> None:
    far = ["/my python", "-P", "-m", "stretto.launch.far"]
    assert command("ip netns exec {host}", "n0", "/my python") == ["ip", "netns", "exec", "n0", *far]
    *words, last = command(SSH, "n0", "/my python")
    assert words[-1] == "n0" and "BatchMode=yes" in words and last == "'/my python' -P -m stretto.launch.far"
    for text, says in (("ssh", r"expected \{host\}"), ("ssh 'x {host}", "close what is quoted")):
        with pytest.raises(UserError, match=says):
            command(text, "n0", "python")


def test_the_way_to_an_address_is_an_interface_that_is_there() -> None:
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")
    with pytest.raises(LaunchError, match=r"nowhere\.invalid isn't found"):
        interface_to("nowhere.invalid")


def test_a_wrong_interface_and_no_way_are_to_mend() -> None:
    found = {"name": "eth0", "address": "10.0.0.2", "why": "", "named": ""}
    assert _interface(B, found, A).passed
    assert "may wait for ever: unset it" in _interface(B, {**found, "named": "docker0"}, A).mend
    assert _interface(B, {**found, "named": "eth0"}, A).passed
    assert "--hosts NAME=ADDRESS" in _interface(B, {**found, "why": "there is no way"}, A).mend


def test_versions_that_differ_are_to_mend() -> None:
    looked: list[dict[str, Any]] = [{"versions": {"torch": "2.13", "Python": "3.11"}}, {"versions": {"torch": "2.12"}}]
    looked[1]["versions"]["Python"] = "3.11"
    torch, python = versions((A, B), looked)
    assert not torch.passed and torch.said == "2.13 on a; 2.12 on b" and python.passed


def met(why: str = "", unreached: str = "", bound: str = "10.0.0.2") -> list[dict[str, Any]]:
    """Of a, who tries b, and of b."""
    return [
        {"bound": "10.0.0.1", "why": "", "unreached": {"b": unreached} if unreached else {}},
        {"bound": "" if why else bound, "why": why, "unreached": {}},
    ]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (met(unreached="the name bee isn't found (x)"), "add bee to /etc/hosts of a"),
        (met(unreached="bee doesn't take connections (timed out)"), "firewall of b"),
        (met(unreached="bee doesn't take connections (refused)", bound="127.0.1.1"), "on b, bee is 127.0.1.1"),
        (met(why="Cannot assign", unreached="bee doesn't take connections"), "isn't an address of that host"),
    ],
)
def test_hosts_that_do_not_meet_are_told_how_to(found: list[dict[str, Any]], says: str) -> None:
    (wrong,) = (check for check in meetings((A, B), found) if not check.passed)
    assert says in wrong.mend
    assert len([one for one in meetings((A, B), met()) if one.passed]) == 2


def test_a_port_that_nobody_listens_at_is_found_and_nothing_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        alone: dict[str, Any] = {"address": "127.0.0.1", "seconds": 0.2, "others": [["b", "127.0.0.1", 1]]}
        assert "in use" in meet({**alone, "port": port})["why"]
    assert "doesn't take connections" in meet({**alone, "port": port})["unreached"]["b"]


def written(folder: Path, hostnames: tuple[str, str], second: float = 1e9) -> Path:
    """A cluster file of two hosts, the second of which multiplies at that rate."""
    hosts = []
    for place, hostname, rate in zip((A, B), hostnames, (1e9, second), strict=True):
        cluster = {"device": "cpu", "cores": 2, "memory_bytes": 1 << 30}
        found = {"cluster": cluster, "hostname": hostname, "interface": {"name": "eth0"}}
        hosts.append(FoundHost(place, 2, found, {"matrix_flops": {"fp32": {"64": rate}}}))
    Examined(tuple(hosts), (), LINKS).write(folder / "cluster.yaml")
    return folder / "cluster.yaml"


def test_the_file_of_several_hosts_is_read_as_it_was_written(tmp_path: Path) -> None:
    known = read_known(written(tmp_path, ("x", "y")))
    assert known.workers == 4 and known.links.to_json() == LINKS.to_json()
    assert "this host is none of those" in known.links.note and known.links.pace(3) == 1.0


def test_a_worker_has_room_as_on_the_host_that_has_the_least(tmp_path: Path) -> None:
    path = written(tmp_path, ("x", "y"))
    values = yaml.safe_load(path.read_text())
    values["hosts"][1]["memory_bytes"] = 1 << 29
    path.write_text(json.dumps(values))
    assert read_known(path).room == 1 << 28
    values["hosts"][0]["memory_bytes"] = 0  # it couldn't tell
    path.write_text(json.dumps(values))
    assert read_known(path).room is None


def test_work_on_a_slower_host_lasts_longer_unless_it_is_as_good_as_the_same(tmp_path: Path) -> None:
    here = socket.gethostname()
    links = read_known(written(tmp_path, (here, "y"), 4e8)).links
    assert [links.pace(rank) for rank in range(4)] == [1.0, 1.0, 2.5, 2.5] and not links.note
    links = read_known(written(tmp_path, ("x", here), 5e8)).links
    assert [links.pace(rank) for rank in (0, 2)] == [0.5, 1.0], "of the host where one plans, a second is a second"
    assert read_known(written(tmp_path, (here, "y"), 1.05e9)).links.paces == (1.0, 1.0)
    assert read_known(written(tmp_path, (here, here), 5e8)).links.paces == (1.0, 1.0)


def test_a_file_whose_columns_do_not_match_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, ("x", "y"))
    values = yaml.safe_load(path.read_text())
    values["links"]["pairs"][0]["bytes"].append(128)
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"links\.pairs\.0: as many bytes as seconds expected"):
        read_known(path)


@pytest.mark.parametrize(
    ("hosts", "reach", "python", "says"),
    [
        (
            "a,b",
            "sh -c 'echo no way to {host} >&2; exit 255'",
            "",
            r"^a can't be reached by `sh .*: no way to a; log in",
        ),
        ("a,b", "no-such-program {host}", "", "no-such-program: No such file"),
        ("a,b", "env X={host}", "/no/python", "^a can't be reached by `env X=a`: .*No such file"),
        ("a", "env X={host}", "", "expected two or more"),
    ],
)
def test_a_host_that_cannot_be_reached_costs_one_line(hosts: str, reach: str, python: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says) as caught:
        connect(hosts, reach, python)
    assert "\n" not in str(caught.value)
    if "no way" in reach:
        assert "; b can't be reached by `sh" in str(caught.value), "each is named, not the first alone"


def test_a_host_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.launch.reach._ARRIVE_SECONDS", 0.2)
    monkeypatch.setattr("stretto.launch.reach._CLOSE_SECONDS", 0.1)
    with pytest.raises(LaunchError, match=r"^a: no answer within 0 s.*; b: no answer within 0 s"):
        connect("a,b", "sh -c 'exec sleep 60' {host}", "")


def test_a_lone_worker_of_another_launcher_waits_for_no_store() -> None:
    """torchrun and srun name an address for one worker too, and nobody listens there."""
    group = Group(Rendezvous("tcp://127.0.0.1:1", 1, 0, 1))
    assert group.maximum(2.0) == 2.0
    group.close()
    with pytest.raises(ValueError, match="the group of this epoch was closed"):
        group.maximum(2.0)


def test_python_here_is_python_there_unless_another_is_named() -> None:
    assert sys.executable in command("env {host}", "A=1", sys.executable)
