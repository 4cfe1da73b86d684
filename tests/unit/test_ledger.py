"""The ledger and its audit: what counts as committed, and every kind of fault it must see."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.elastic.ledger import LedgerWriter, Start, audit, record_start
from stretto.errors import UserError


def begin(
    run: Path, attempt: int = 1, members: tuple[str, ...] = ("m1", "m2"), from_step: int = 0
) -> list[LedgerWriter]:
    record_start(run, Start(attempt, members, from_step, samples=6, plan="dp=2"))
    return [LedgerWriter(run, member, attempt) for member in members]


def commit(writers: list[LedgerWriter], step: int, epoch: int, start: int, *shares: list[int]) -> None:
    stop = start + sum(len(share) for share in shares)
    for writer, share in zip(writers, shares, strict=True):
        writer.commit(step, epoch, start, stop, share)


def test_a_clean_run_over_two_epochs(tmp_path: Path) -> None:
    both = begin(tmp_path)
    commit(both, 1, 0, 0, [3, 1], [0])
    commit(both, 2, 0, 3, [5, 2], [4])
    commit(both, 3, 1, 0, [0], [])
    report = audit(tmp_path)
    assert report.ok and report.steps == 3
    assert [(e.expected, e.seen, e.missing, e.repeated) for e in report.epochs] == [(6, 6, 0, 0), (1, 1, 0, 0)]


def test_a_kill_between_vote_and_write_leaves_the_last_step_out(tmp_path: Path) -> None:
    both = begin(tmp_path)
    commit(both, 1, 0, 0, [3], [1])
    both[0].commit(2, 0, 2, 4, [0])
    report = audit(tmp_path)
    assert report.ok and report.steps == 1


def test_a_gap_that_is_not_the_end_is_a_fault(tmp_path: Path) -> None:
    both = begin(tmp_path)
    commit(both, 1, 0, 0, [3], [1])
    both[0].commit(2, 0, 2, 4, [0])
    commit(both, 3, 0, 4, [5], [2])
    report = audit(tmp_path)
    assert not report.ok
    assert report.faults[0] == "step 2: not every member recorded it"
    assert report.epochs[0].missing == 1


def test_a_resume_voids_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    commit(begin(tmp_path), 1, 0, 0, [3], [1])
    first = [LedgerWriter(tmp_path, member, 1) for member in ("m1", "m2")]
    commit(first, 2, 0, 2, [0], [5])
    again = begin(tmp_path, attempt=2, members=("m3",), from_step=1)
    commit(again, 2, 0, 2, [0, 5])
    commit(again, 3, 0, 4, [2, 4])
    report = audit(tmp_path)
    assert report.ok, report.faults
    assert report.epochs[0].seen == 6


@pytest.mark.parametrize(
    ("second", "says"),
    [([3], "sample 3 came 2 times"), ([9], "sample 9 is not in the dataset"), ([], "1 of 2 samples never came")],
)
def test_faults_are_named(tmp_path: Path, second: list[int], says: str) -> None:
    for writer, share in zip(begin(tmp_path), ([3], second), strict=True):
        writer.commit(1, 0, 0, 2, share)
    report = audit(tmp_path)
    assert not report.ok
    assert any(says in fault for fault in report.faults), report.faults


def test_a_line_cut_short_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    both = begin(tmp_path)
    commit(both, 1, 0, 0, [3], [1])
    with (tmp_path / "ledger" / "member-m1.jsonl").open("a") as file:
        file.write('{"attempt":1,"step":2,"ra')
    assert audit(tmp_path).ok


def test_a_folder_without_a_ledger_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no ledger"):
        audit(tmp_path)
