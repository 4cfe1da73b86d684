"""The launcher's parts that need no worker: judging an end, finding oneself, following a log, jobs as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.elastic.failure import Failure
from stretto.errors import LaunchError, PeerLost, UserError
from stretto.launch.context import attach, first_host
from stretto.launch.failures import describe, judge
from stretto.launch.interface import interface_to
from stretto.launch.job import Job, resolve
from stretto.launch.tail import Tail

STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def attach_with(variables: dict[str, str]) -> dict[str, Any]:
    """What attach() makes of these variables, in a process of its own, because a context lasts for the process."""
    code = (
        "import json, os\nfrom stretto.errors import UserError\nfrom stretto.launch import attach, current\n"
        "assert current() is None\n"
        "try: c = attach()\nexcept UserError as e: print(json.dumps({'error': str(e)}))\n"
        "else:\n assert current() is c is attach()\n"
        " print(json.dumps({'member': c.member, 'rank': c.rank, 'size': c.world_size, 'local': c.local_rank,"
        " 'epoch': c.epoch.to_message(), 'serves': c.store_server is not None,"
        " 'interface': os.environ.get('GLOO_SOCKET_IFNAME')}))\n"
    )
    others = ("SLURM_", "GLOO_")
    clean = {k: v for k, v in os.environ.items() if k not in STARTERS and not k.startswith(others)}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_alone_is_one_worker() -> None:
    found = attach_with({})
    assert (found["member"], found["rank"], found["size"], found["epoch"]["store"]) == ("m1", 0, 1, "")


def test_torchrun_is_understood() -> None:
    torchrun = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    found = attach_with({**torchrun, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (found["member"], found["rank"], found["size"], found["local"]) == ("m3", 2, 3, 1)
    assert found["epoch"]["store"] == "tcp://127.0.0.1:29511"
    assert (found["epoch"]["number"], found["epoch"]["attempt"]) == (2, 2)
    assert not found["serves"]


def test_gloo_is_told_the_interface_that_leads_to_rank_0_unless_the_user_has_named_one() -> None:
    far = "198.51.100.1"  # no packet is sent there
    try:
        leads: str | None = interface_to(far)[0]
    except LaunchError:  # a machine without a network
        leads = None
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": far, "MASTER_PORT": "29511"}
    assert attach_with(torchrun)["interface"] == leads != "lo"
    assert attach_with({**torchrun, "GLOO_SOCKET_IFNAME": "lo"})["interface"] == "lo"
    assert attach_with({**torchrun, "MASTER_ADDR": "127.0.0.1"})["interface"] == "lo"
    assert attach_with({**torchrun, "MASTER_ADDR": "127.0.1.1"})["interface"] is None, "a name that Debian gave"
    assert attach_with({**torchrun, "MASTER_ADDR": "no.such.host.invalid"})["interface"] is None


def test_slurm_is_understood_and_rank_0_hosts_the_store() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"}
    found = attach_with({**slurm, "SLURM_JOB_NODELIST": "gpu[07-09,12],login1"})
    assert (found["rank"], found["size"], found["epoch"]["store"]) == (1, 4, "tcp://gpu07:21234")
    zero = {**slurm, "SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    assert attach_with(zero)["serves"]
    step = attach_with({**slurm, "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1"})
    assert step["size"] == 2


@pytest.mark.parametrize(
    ("nodes", "host"), [("n1", "n1"), ("a1,b2", "a1"), ("n[3-5,9],m1", "n3"), ("rack1-n[007]", "rack1-n007")]
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "rank 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK is 'x': expected a number"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_variables_that_are_not_whole_are_one_line(variables: dict[str, str], says: str) -> None:
    found = attach_with(variables)
    assert says in found["error"] and "\n" not in found["error"]


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = attach_with({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert "choose a free port with MASTER_PORT" in found["error"] and "\n" not in found["error"]


def test_attach_gives_the_lone_context_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    context = attach()
    context.control.send({"kind": "step", "loss": 1.0})
    context.control.send({"kind": "note", "text": "mind this"})
    assert capsys.readouterr() == ("", "stretto: mind this\n"), "a person is told what matters, on standard error"
    called: list[int] = []
    context.control.on_break(lambda: called.append(1))()
    assert not context.control.stop_requested() and not called


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def caused(error: BaseException, cause: BaseException, suppressed: bool = False) -> BaseException:
    try:
        try:
            raise cause
        except BaseException:
            if suppressed:
                raise error from None
            raise error from ValueError("between")
    except BaseException as caught:
        return caught


def test_a_user_error_is_one_line_and_exit_code_2() -> None:
    word = describe(raised(UserError("expected a\n  plan")))
    failure = judge("m2", 1, 2, 9.0, word)
    assert failure == Failure("m2", 1, "user", "expected a plan", 2, time=word["time"])
    assert str(failure) == "expected a plan"


def test_a_program_error_keeps_its_whole_traceback_and_its_place() -> None:
    failure = judge("m2", 1, 1, 9.0, describe(raised(ZeroDivisionError("here")), "dp=1, tp=0"))
    assert failure is not None and failure.kind == "program" and failure.exit_code == 1
    assert "in raised" in failure.text and failure.text.endswith("ZeroDivisionError: here")
    assert str(failure).startswith("rank 1 (member m2, dp=1, tp=0) failed:\nTraceback")


@pytest.mark.parametrize("suppressed", [False, True])
def test_what_a_lost_peer_caused_is_a_consequence(suppressed: bool) -> None:
    assert describe(raised(PeerLost("gone")))["consequence"]
    assert describe(caused(RuntimeError("backward"), PeerLost("gone"), suppressed))["consequence"]
    assert not describe(caused(RuntimeError("backward"), KeyError("x")))["consequence"]


def test_what_a_users_own_call_of_torchs_sees_of_a_lost_peer_is_a_consequence_too() -> None:
    from stretto.comm.shm_segment import CallsDiffer, Lost

    assert describe(raised(Lost("rank 1 died")))["consequence"]
    assert describe(raised(RuntimeError("[gloo/gloo/transport/tcp/pair.cc:537] Read error")))["consequence"]
    assert not describe(raised(CallsDiffer("rank 1 is in barrier no. 8")))["consequence"]


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [(3, 3, "sys.exit(3) was called"), ("stop here", 1, "stop here"), (256, 1, "sys.exit(256) was called")],
)
def test_sys_exit_keeps_its_code(code: int | str, exit_code: int, text: str) -> None:
    failure = judge("m1", 0, exit_code, 0.0, describe(SystemExit(code)))
    assert failure is not None and (failure.exit_code, failure.text) == (exit_code, text)


def test_ends_without_a_word() -> None:
    killed = judge("m2", 1, -9, 5.0, None)
    assert killed is not None and (killed.kind, killed.exit_code, killed.time) == ("signal", 137, 5.0)
    assert "member m2 (rank 1) was killed by signal 9 (SIGKILL)" in killed.text and "out-of-memory" in killed.text
    segfault = judge("m2", 1, -11, 5.0, {"kind": "done", "result": None})
    assert segfault is not None and segfault.exit_code == 139 and "out-of-memory" not in segfault.text
    silent = judge("m2", 1, 0, 5.0, None)
    assert silent is not None and silent.exit_code == 1 and "before its work was done" in silent.text
    assert judge("m2", 1, 0, 5.0, {"kind": "done", "result": None}) is None


def test_a_job_survives_json(tmp_path: Path) -> None:
    job = Job("a:b", {"x": 1}, 3, "c:d", 4, 2, 5, tmp_path, ("p",), 7.5)
    assert Job.from_message(job.to_message()) == job
    assert Job.from_message(Job("a:b").to_message()) == Job("a:b")
    assert job.log_of("m4") == tmp_path / "member-m4.log" and Job("a:b").log_of("m1") is None


def test_an_entry_is_a_module_and_a_function() -> None:
    assert resolve("os.path:join") is os.path.join
    with pytest.raises(ValueError, match="module:function"):
        resolve("os.path")


def test_a_tail_shows_only_what_is_new_and_no_half_letter(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    shown: list[str] = []
    tail = Tail(log, shown.append)
    tail.follow()
    letter = "é".encode()
    with log.open("ab") as file:
        file.write(b"new " + letter[:1])
        file.flush()
        tail.follow()
        file.write(letter[1:] + b"\xff\n")
    tail.follow()
    assert "".join(shown) == "new é\N{REPLACEMENT CHARACTER}\n"
    missing = Tail(tmp_path / "later", shown.append)
    missing.follow()
    (tmp_path / "later").write_text("now")
    missing.follow()
    assert shown[-1] == "now"


def test_the_launchers_side_needs_no_torch() -> None:
    code = (
        "import sys, stretto.launch, stretto.elastic.coordinator; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
