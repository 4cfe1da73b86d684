"""Jobs on real workers: what they are given, how they end, and what is told of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.elastic.coordinator import Graces
from stretto.errors import LaunchError
from stretto.launch import Job, JobResult, LocalLauncher

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
SHORT = Graces(1.0, 0.5, 1.0)

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def light() -> Iterator[LocalLauncher]:
    """A server without torch: most of what is tested here has nothing to do with it."""
    with LocalLauncher(graces=SHORT) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def heavy(launcher: LocalLauncher) -> LocalLauncher:
    return launcher


def job(entry: str, payload: dict[str, Any] | None = None, num_workers: int = 2, **more: Any) -> Job:
    if "prepare" in more:
        more["prepare"] = f"launch_entries:{more['prepare']}"
    return Job(f"launch_entries:{entry}", payload or {}, num_workers, python_path=(HELPERS,), **more)


def failing(launcher: LocalLauncher, how: dict[int, str], num_workers: int = 2, **payload: Any) -> JobResult:
    payload["how"] = {str(rank): way for rank, way in how.items()}
    return launcher.run(job("fail", payload, num_workers))


def alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and waits for its parent's glance does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- what workers are given


def test_a_worker_knows_who_it_is(light: LocalLauncher) -> None:
    events: Events = []
    asked = job("where", num_workers=3, prepare="count", first_member=4, attempt=2, threads=3)
    result = light.run(asked, on_event=lambda member, event: events.append((member, event)))
    assert result.exit_code == 0 and result.failure is None
    assert events == [("host", {"kind": "note", "text": "preparing"})]
    assert sorted(result.results) == ["m4", "m5", "m6"]
    for rank, member in enumerate(("m4", "m5", "m6")):
        found = result.results[member]
        assert found is not None
        assert (found["member"], found["rank"], found["local_rank"], found["world_size"]) == (member, rank, rank, 3)
        assert found["epoch"]["members"] == ["m4", "m5", "m6"] and found["epoch"]["attempt"] == 2
        assert found["epoch"]["store"].startswith("file:///")
        assert found["environment"] == {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "lo"}
        assert found["prepared"]["pid"] == found["host"], "prepared once, by the host that forked the workers"
        assert found["imports_rss_bytes"] > 1 << 20
        assert not found["torch"] and found["collects"]
        assert not alive(found["pid"]) and not alive(found["host"])


def test_each_job_meets_at_a_store_of_its_own(light: LocalLauncher) -> None:
    stores = set()
    for _ in range(2):
        result = light.run(job("where", num_workers=1))
        found = result.results["m1"]
        assert found is not None
        stores.add(found["epoch"]["store"])
    assert len(stores) == 2
    assert not any(Path(store.removeprefix("file://")).parent.exists() for store in stores), (
        "left in the temporary folder"
    )


@pytest.mark.alone
def test_from_the_request_to_the_entry_and_to_a_sharded_backward(heavy: LocalLauncher) -> None:
    heavy.run(job("where", num_workers=2))  # the imports are paid for once
    entered, backward = [], []
    for _ in range(20):
        asked = time.monotonic()
        result = heavy.run(job("sharded_backward", num_workers=2))
        assert result.exit_code == 0, result.failure
        times = [found for found in result.results.values() if found is not None]
        entered.append(max(found["entered"] for found in times) - asked)
        backward.append(max(found["done"] for found in times) - asked)
        if min(entered) < 0.1 and min(backward) < 0.3:
            break
    print(f"request to entry {min(entered):.3f} s, to backward {min(backward):.3f} s")
    # The least: what it costs, not what else the machine was doing.
    assert min(entered) < 0.1, entered
    assert min(backward) < 0.3, backward


def test_the_server_has_one_thread_and_prepares_on_one(heavy: LocalLauncher) -> None:
    found = heavy.run(job("where", num_workers=1, prepare="count")).results["m1"]
    assert found is not None and found["torch"]
    assert found["prepared"]["threads"] == 1
    assert heavy._server is not None
    assert len(os.listdir(f"/proc/{heavy._server._process.pid}/task")) == 1


def test_members_meet_in_a_group_that_is_broken_when_one_fails(heavy: LocalLauncher) -> None:
    result = heavy.run(job("gloo", {}, 3))
    assert [found and found["sum"] for found in result.results.values()] == [[3.0] * 3] * 3
    asked = time.monotonic()
    result = heavy.run(job("gloo", {"dies": 1}, 3))
    assert time.monotonic() - asked < 3.0, "the others slept on in their collective"
    assert result.failure is not None and result.failure.rank == 1
    assert "rank-local trouble" in result.failure.text and "stretto/launch/" not in result.failure.text


# ---- what is said and printed


def test_much_and_large_talk_arrives_whole_though_the_worker_has_ended(light: LocalLauncher, tmp_path: Path) -> None:
    events: Events = []
    shown: list[str] = []
    payload = {"events": 3000, "bytes": 5 << 20, "printed": 3 << 20}
    result = light.run(
        job("talk", payload, 2, log_dir=tmp_path / "logs"), lambda m, e: events.append((m, e)), shown.append
    )
    assert result.exit_code == 0, result.failure
    for member in ("m1", "m2"):
        numbers = [event["number"] for who, event in events if who == member and event["kind"] == "number"]
        assert numbers == list(range(3000))
        assert [len(event["text"]) for who, event in events if who == member and event["kind"] == "large"] == [5 << 20]
        log = (tmp_path / "logs" / f"member-{member}.log").read_text()
        assert "y" * (3 << 20) in log and f"printed by {int(member[1]) - 1}" in log and "and this on" in log
    assert "".join(shown) == (tmp_path / "logs" / "member-m1.log").read_text(), "seen once: the lowest rank's"


def test_a_worker_is_judged_by_all_that_it_said(light: LocalLauncher) -> None:
    """While the launcher is busy with an event, the worker says its last words and ends."""
    events: Events = []

    def busy(member: str, event: dict[str, Any]) -> None:
        events.append((member, event))
        time.sleep(0.5 if event["kind"] == "number" else 0)

    result = light.run(job("talk", {"events": 1, "pause": 0.1, "bytes": 10, "printed": 0}, 1), busy)
    assert result.exit_code == 0, result.failure
    assert [event["kind"] for _, event in events] == ["number", "large"]


def test_a_message_that_json_cannot_hold_is_the_workers_failure(light: LocalLauncher) -> None:
    result = light.run(job("unserious", num_workers=1))
    assert result.exit_code == 1 and result.failure is not None
    assert "not JSON serializable" in result.failure.text


def test_a_worker_ends_like_a_script(light: LocalLauncher, tmp_path: Path) -> None:
    for how in ("return", "exit"):
        folder = tmp_path / how
        folder.mkdir()
        result = light.run(job("like_a_script", {"folder": str(folder), "how": how}, 1))
        assert (result.exit_code, result.results) == (0, {"m1": None})
        assert sorted(path.name for path in folder.iterdir()) == ["handler", "thread"]


# ---- failures


def test_a_user_error_is_one_line_and_exit_code_2(light: LocalLauncher) -> None:
    result = failing(light, {1: "user"})
    assert result.exit_code == 2 and result.failure is not None
    assert (result.failure.kind, str(result.failure)) == ("user", "expected a smaller batch")
    assert result.results == {}


def test_the_first_failing_ranks_traceback_is_the_one_reported(light: LocalLauncher, tmp_path: Path) -> None:
    payload = {"how": {"0": "late", "1": "lost", "2": "program", "3": "wrapped"}}
    result = light.run(job("fail", payload, 4, log_dir=tmp_path))
    failure = result.failure
    assert failure is not None and result.exit_code == 1
    assert (failure.member, failure.rank, failure.coordinates, failure.kind) == ("m3", 2, "dp=2", "program")
    assert str(failure).startswith("rank 2 (member m3, dp=2) failed:\nTraceback (most recent call last):\n")
    assert str(failure).endswith("ZeroDivisionError: the first cause")
    assert "stretto/launch/" not in failure.text, "our own frames say nothing"
    assert "a later cause" in (tmp_path / "member-m1.log").read_text(), "each failure is in its member's log"


def test_only_consequences_are_still_a_failure(light: LocalLauncher) -> None:
    result = failing(light, {0: "lost", 1: "wrapped"})
    assert result.exit_code == 1 and result.failure is not None and result.failure.consequence


@pytest.mark.alone
def test_the_others_hear_of_the_break_and_are_not_waited_for(light: LocalLauncher) -> None:
    asked = time.monotonic()
    result = failing(light, {0: "program"}, 3)
    assert time.monotonic() - asked < 1.0, "those who heard the break were waited for"
    assert result.failure is not None and result.failure.rank == 0


@pytest.mark.alone
def test_who_does_not_listen_is_terminated_then_killed(light: LocalLauncher) -> None:
    asked = time.monotonic()
    result = failing(light, {0: "program", 1: "deaf", 2: "stubborn"}, 3)
    assert 1.4 < time.monotonic() - asked < 3.0, "1 s to hear the break, 0.5 s to heed SIGTERM"
    assert result.failure is not None and (result.failure.rank, result.failure.kind) == (0, "program")


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_an_exit_code_is_kept(light: LocalLauncher, how: str) -> None:
    result = failing(light, {1: how}, code=17)
    assert result.exit_code == 17 and result.failure is not None and result.failure.rank == 1


def test_leaving_with_0_before_the_end_is_no_success(light: LocalLauncher) -> None:
    result = failing(light, {1: "_exit"}, code=0)
    assert result.exit_code == 1 and result.failure is not None
    assert "before its work was done" in result.failure.text


def test_sys_exit_0_is_a_good_end(light: LocalLauncher) -> None:
    result = failing(light, {0: "exit", 1: "done"}, code=0)
    assert (result.exit_code, result.results) == (0, {"m1": None, "m2": None})


def test_a_crash_leaves_its_traceback_in_the_log(light: LocalLauncher, tmp_path: Path) -> None:
    result = light.run(job("crash", num_workers=1, log_dir=tmp_path), on_output=lambda text: None)
    assert result.exit_code == 139 and result.failure is not None and "SIGSEGV" in result.failure.text
    assert "launch_entries.py" in (tmp_path / "member-m1.log").read_text()


# ---- before there are workers


def test_a_users_mistake_while_preparing_starts_no_worker(light: LocalLauncher, tmp_path: Path) -> None:
    result = light.run(job("where", num_workers=3, prepare="prepare_user_error", log_dir=tmp_path / "logs"))
    assert result.exit_code == 2 and result.failure is not None and result.results == {}
    assert str(result.failure) == "the task has no model"
    assert not (tmp_path / "logs").exists(), "no worker was ever there to make it"


def test_a_program_error_while_preparing_keeps_its_traceback(light: LocalLauncher) -> None:
    result = light.run(job("where", prepare="prepare_program_error"))
    assert result.exit_code == 1 and result.failure is not None
    assert str(result.failure).startswith("host (before there were workers) failed:\nTraceback") and "nothing there" in result.failure.text


@pytest.mark.parametrize(("code", "expected"), [(9, 9), (0, 1)])
def test_an_exit_while_preparing_is_a_failure(light: LocalLauncher, code: int, expected: int) -> None:
    assert light.run(job("where", {"code": code}, prepare="prepare_exit")).exit_code == expected


def test_a_host_that_is_killed_is_told_of(light: LocalLauncher) -> None:
    result = light.run(job("where", prepare="prepare_killed"))
    assert result.exit_code == 137 and result.failure is not None
    assert "host was killed by signal 9" in str(result.failure)


def test_an_entry_that_is_not_there_is_told_of(light: LocalLauncher) -> None:
    result = light.run(job("nowhere"))
    assert result.exit_code == 1 and result.failure is not None and "nowhere" in result.failure.text


def test_fewer_workers_than_asked_are_no_job(light: LocalLauncher) -> None:
    result = light.run(job("where", num_workers=3, prepare="prepare_no_room"))
    assert (result.exit_code, result.results) == (2, {}) and result.failure is not None
    assert str(result.failure) == "worker m2 cannot be started: Resource temporarily unavailable"


def test_a_log_that_cannot_be_written_is_one_line(light: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = light.run(job("where", log_dir=tmp_path / "file"))
    assert result.exit_code == 2 and result.failure is not None
    assert "member-m" in str(result.failure) and "cannot be written: " in str(result.failure)
    assert "\n" not in str(result.failure)


def test_a_module_that_cannot_be_imported_is_one_line() -> None:
    with LocalLauncher(["no_such_module"]) as launcher, pytest.raises(LaunchError, match="no_such_module") as caught:
        launcher.run(job("where"))
    assert "\n" not in str(caught.value)


def test_a_server_that_ends_unexpectedly_is_one_line_and_the_next_job_gets_another() -> None:
    with LocalLauncher() as launcher:
        found = launcher.run(job("where", num_workers=1)).results["m1"]
        assert found is not None and launcher._server is not None

        def kill(member: str, event: dict[str, Any]) -> None:
            assert launcher._server is not None
            launcher._server._process.kill()
            killed.append(event["pid"])

        killed: list[int] = []
        with pytest.raises(LaunchError, match=r"ended unexpectedly \(exit status -9\)") as caught:
            launcher.run(job("deaf_to_stop"), on_event=kill)
        assert "\n" not in str(caught.value)
        time.sleep(0.2)
        assert killed and not any(map(alive, killed))
        assert launcher.run(job("where", num_workers=1)).exit_code == 0


def test_a_callback_that_raises_leaves_no_worker() -> None:
    seen: list[int] = []

    def refuse(member: str, event: dict[str, Any]) -> None:
        seen.append(event["pid"])
        raise OSError("the terminal is gone")

    with LocalLauncher() as launcher, pytest.raises(OSError, match="terminal is gone"):
        launcher.run(job("deaf_to_stop"), on_event=refuse)
    time.sleep(0.2)
    assert seen and not any(map(alive, seen))


@pytest.mark.parametrize("victim", ["worker", "host"])
def test_after_a_job_nothing_of_it_is_left_while_the_launcher_goes_on(heavy: LocalLauncher, victim: str) -> None:
    events: Events = []

    def listen(member: str, event: dict[str, Any]) -> None:
        events.append((member, event))
        if victim == "host":
            os.kill(event["host"], signal.SIGKILL)

    result = heavy.run(job("descendants", {"then": "end" if victim == "worker" else "sleep"}, 1), listen)
    assert result.exit_code == 137
    [(_, ready)] = events
    deadline = time.monotonic() + 1.0
    while any(map(alive, (ready["pid"], ready["program"]))):
        assert time.monotonic() < deadline, "the program that a worker had started outlives the job"
        time.sleep(0.01)


# ---- policies


class RespawnOnce:
    """Tries once more."""

    def __init__(self) -> None:
        self.asked = 0

    def on_end(self, member: str, status: int) -> Any:
        self.asked += 1
        return "respawn" if self.asked == 1 else "stop"


def test_a_policy_may_start_the_members_afresh() -> None:
    with LocalLauncher(policy=RespawnOnce(), graces=Graces(0.1, 0.5, 1.0)) as launcher:
        result = launcher.run(job("second_attempt"))
    assert result.exit_code == 0, result.failure
    assert result.results == {"m3": {"attempt": 2}, "m4": {"attempt": 2}}
