"""``zero=3`` on one host, one copy of the weights: what happens where it can't be had, and where a worker dies in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import Starter
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.plan import Plan
from stretto.preload import preloads

TESTS = Path(__file__).resolve().parents[1]
EDGES = TESTS / "tasks" / "edge_parts.py"


def run(launcher: LocalLauncher, entry: str, plan: str = "dp=2,zero=3", **payload: Any) -> JobResult:
    payload = {"task": str(EDGES), "plan": plan, **payload}
    workers = Plan.parse(plan).world_size
    return launcher.run(Job(f"one_copy_entries:{entry}", payload, workers, python_path=(str(TESTS / "helpers"),)))


@pytest.mark.parametrize(("what", "rank"), [("ENOSPC", 0), ("EMFILE", 0), ("ENOMEM", 0), ("ENOMEM", 1), ("/proc", 1)])
def test_where_one_rank_gets_no_memory_all_take_fsdp2_and_say_so(launcher: LocalLauncher, what: str, rank: int) -> None:
    found = {}
    for at in (rank, None):
        result = run(launcher, "refused", what=what, rank=at)
        assert result.failure is None, result.failure.text
        found[at] = list(result.results.values())
    assert [worker["layout"] for worker in found[None]] == ["Whole"] * 2
    assert [worker["note"] for worker in found[None]] == [""] * 2
    for worker, other in zip(found[rank], found[None], strict=True):
        assert worker["layout"] == "Sharded"
        assert f"without one copy of the weights for all workers, as rank {rank}: " in worker["note"]
        assert "planted" in worker["note"] and "(FSDP2)" in worker["note"]
        assert worker["losses"] == pytest.approx(other["losses"], rel=1e-13)


@pytest.mark.parametrize("where", ["offer", "take", "forward", "update"])
def test_a_worker_killed_while_it_shares_is_named_soon(launcher: LocalLauncher, where: str) -> None:
    began = time.monotonic()
    failure = run(launcher, "killed", "dp=3,zero=3", where=where).failure
    assert failure is not None and f"(rank {0 if where == 'offer' else 2}) was killed by signal 9" in failure.text
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("where", ["enter", "_back"])
def test_a_worker_killed_between_two_pieces_is_named_soon(launcher: LocalLauncher, where: str) -> None:
    began = time.monotonic()
    payload = {"task": str(TESTS / "tasks" / "skips.py"), "plan": "dp=2,pp=2,zero=3", "where": where}
    job = Job("gathered_entries:killed", payload, 4, python_path=(str(TESTS / "helpers"),))
    failure = launcher.run(job).failure
    assert failure is not None and "(rank 3) was killed by signal 9" in failure.text
    assert time.monotonic() - began < 25


def test_nothing_stays_of_many_copies_in_one_process(launcher: LocalLauncher) -> None:
    """Fifty rounds of 8 MB."""
    result = run(launcher, "rounds", rounds=50, sets={"kind": "frozen", "width": 400})
    assert result.failure is None, result.failure.text
    for held in result.results.values():
        (_, _, early), (_, _, late) = held[5], held[-1]
        assert len({(files, mapped) for files, mapped, _ in held[1:]}) == 1
        assert late - early < 4 << 20, f"{late - early} bytes more"


@pytest.mark.alone
@pytest.mark.parametrize(("plan", "kind"), [("dp=3,zero=3", "frozen"), ("dp=2,zero=3,loaders=2", "plain")])
def test_the_peak_that_is_told_is_the_one_that_is_seen(
    launcher: LocalLauncher, tmp_path: Path, plan: str, kind: str
) -> None:
    """A frozen model's peak is at its start, when the weights lie in the template and, in part, in what all share."""
    starter = Starter(launcher)
    sets = {"kind": kind, "width": 1000 if kind == "frozen" else 3}
    result = starter.good(tmp_path / "run", EDGES, plan, entry="one_copy_entries:sampled", **sets)
    told = max(worker["told"] for worker in result.results.values())
    seen = max(worker["seen"] for worker in result.results.values())
    assert told == pytest.approx(seen, abs=4 << 20)
