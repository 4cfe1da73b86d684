"""The process group over shared memory: what it computes, and how it ends when a member doesn't come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.launch import Job, LocalLauncher
from stretto.plan import Plan
from stretto.preload import preloads

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


def play(launcher: LocalLauncher, scene: str, workers: int, seconds: float = 30, **options: Any) -> list[Any]:
    """What each member of the scene reports, in rank order."""
    payload = {"scene": scene, "workers": workers, "options": options, "seconds": seconds}
    result = launcher.run(Job("comm_entries:scene", payload, 1, python_path=(HELPERS,)))
    assert result.failure is None, result.failure.text
    return next(iter(result.results.values()))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["shared memory", "gloo"])
def test_every_collective_gives_what_is_added_up_by_hand(launcher: LocalLauncher, backend: str, workers: int) -> None:
    if backend == "gloo" and workers in (1, 4):
        pytest.skip("Gloo is the measure here, not what is tested: two sizes do")
    cases = {1: 6, 2: 16, 3: 12, 4: 6, 8: 2}[workers]
    for wrong in play(launcher, "conforms", workers, 50, backend=backend, cases=cases):
        assert wrong == []


@pytest.mark.alone
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("inside", [True, False])
def test_a_killed_member_is_missed_by_name(launcher: LocalLauncher, workers: int, inside: bool) -> None:
    """By itself: there is no launcher that says so, and the dead process isn't even reaped."""
    for after in (0.1, 0.117, 0.131) if inside else (0.0,):
        *survivors, dead = play(launcher, "killed", workers, inside=inside, after=after)
        assert dead == {"exit": -9}
        for found in survivors:
            assert found["kind"] == "PeerLost" and f"rank {workers - 1} died" in found["text"], found
            assert found["took"] < 0.5
            assert found["again"]["kind"] == "PeerLost", "the group is of no use any more"


@pytest.mark.alone
@pytest.mark.parametrize("how", ["asleep", "stopped"])
def test_a_break_frees_a_waiting_member_at_once(launcher: LocalLauncher, how: str) -> None:
    first, second = play(launcher, "broken", 2, 2, how=how)
    assert first["kind"] == "PeerLost" and "the group was broken" in first["text"]
    assert first["took"] < 0.1
    assert "the group was broken" in first["sub"]["text"], "subgroups end with it"
    if how == "asleep":
        assert second["kind"] == "PeerLost" and "rank 0 left" in second["text"]


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        (
            ("all_gather", "all_reduce"),
            ("all_gather no. 1 (2 x 100", "all_reduce no. 1 (1 x 100 bytes of float32, sum)"),
        ),
        (("all_reduce", "all_gather", "all_reduce"), ("all_gather no. 1", "all_reduce no. 1")),
        (("all_reduce", "all_reduce of more"), ("1 x 100 bytes", "1 x 104 bytes")),
        (("all_reduce", "all_reduce", "all_reduce of doubles"), ("float32", "int32")),
        (("all_reduce", "maximum"), ("sum", "max")),
        (("from 0", "from 1"), ("from rank 0", "from rank 1")),
    ],
)
def test_calls_that_differ_are_named_on_every_rank(
    launcher: LocalLauncher, calls: tuple[str, ...], named: tuple[str, str]
) -> None:
    """Where most make the same call, they lose the odd one, whose error is the cause."""
    for rank, found in enumerate(play(launcher, "differ", len(calls), 5, calls=calls)):
        among_most = calls.count(calls[rank]) > len(calls) / 2
        assert found["kind"] == ("PeerLost" if among_most else "CallsDiffer"), found
        assert all(name in found["text"] for name in named), found


@pytest.mark.alone
def test_a_call_made_by_one_rank_alone_ends_in_time_and_costs_nothing_hg07(launcher: LocalLauncher) -> None:
    first, *others = play(launcher, "alone", 3, timeout=1.0)
    assert first["kind"] == "PeerLost"
    assert "rank 0 waited 1 s in reduce_scatter no. 2" in first["text"] and "for ranks 1, 2" in first["text"]
    assert 1.0 <= first["took"] < 1.5
    assert first["busy"] < 0.1, "who waits sleeps"
    for found in others:
        assert found["kind"] == "PeerLost" and "rank 0 is in reduce_scatter no. 2 (3 x 12 bytes" in found["text"]


def test_a_member_that_has_closed_its_group_is_not_waited_for(launcher: LocalLauncher) -> None:
    first, _, third = play(launcher, "closed", 3, 5)
    for found in (first, third):
        assert found["kind"] == "PeerLost" and "rank 1" in found["text"] and "closed" in found["text"]


@pytest.mark.alone
@pytest.mark.parametrize("workers", [1, 2])
def test_groups_come_and_go_in_one_process_la14(launcher: LocalLauncher, workers: int) -> None:
    for found in play(launcher, "cycles", workers):
        assert found["transport"] == "shared memory"
        assert max(found["took"]) < 1
        assert len(set(found["open_files"][1:])) == 1, "nothing stays open"


def test_without_room_for_shared_memory_all_members_take_gloo(launcher: LocalLauncher) -> None:
    for found in play(launcher, "no_room", 2):
        assert found["transport"].startswith("gloo (rank 0: no memory to share (4 MiB): [Errno 27]"), found
        assert found["sum"] == 2


@pytest.mark.alone
def test_calls_under_way_end_in_their_order(launcher: LocalLauncher) -> None:
    first, second = play(launcher, "late", 2)
    assert first["early"] == [False] * 4, "the call returns though the other rank is busy"
    for found in (first, second):
        assert found["after"] == [True] * 3
        assert found["sums"] == [0, 2, 4, 6] and found["future"] == 6
    assert second["took"] < 0.4, "what rank 0 gave at its call is there, though it sleeps before it waits"


def test_subgroups_have_memory_of_their_own(launcher: LocalLauncher) -> None:
    reports = play(launcher, "subgroups", 4)
    assert [found["row"] for found in reports] == [3, 3, 7, 7]
    assert [found["column"] for found in reports] == [4, 6, 4, 6]


def test_a_second_thread_has_its_own_group_hg09(launcher: LocalLauncher) -> None:
    for found in play(launcher, "two_threads", 2):
        assert found == {"saver": 38, "main": 78}


def test_what_it_does_not_do_is_said(launcher: LocalLauncher) -> None:
    for found in play(launcher, "refused", 2):
        assert found.pop("sum") == 2, "a refusal costs nobody anything"
        assert {name: result["kind"] for name, result in found.items()} == dict.fromkeys(found, "NotImplementedError")


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_ddp_fsdp2_and_dtensor_run_on_it(launcher: LocalLauncher, workers: int) -> None:
    for found in play(launcher, "frameworks", workers):
        assert max(found.values()) < 1e-14, found
