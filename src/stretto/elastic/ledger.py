"""The sample ledger: which samples each member really fed into each committed step, and the audit of it.

Every member appends one line a committed step, after the vote. Nothing is derived: an audit compares what was fed with
what an epoch must hold, so a sampler that repeats, a rank that feeds another's share, or a restart that forgets shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.errors import UserError
from stretto.observe.events import LineFile, read_lines

STARTS_NAME = "starts.jsonl"


@dataclass(frozen=True)
class Start:
    """One start of a run: the first or a resume.

    Args:
        attempt: counts from 1.
        members: who took part.
        from_step: committed steps it builds on; later ones of earlier attempts are void.
        samples: samples of the training dataset.
        plan: for people.
    """

    attempt: int
    members: tuple[str, ...]
    from_step: int
    samples: int
    plan: str


def record_start(run: Path, start: Start) -> None:
    """Appends ``start`` to the run's list, before its first step. One member calls it."""
    file = LineFile(run / "ledger" / STARTS_NAME)
    file.append(asdict(start))
    file.sync()
    file.close()


def read_starts(run: Path) -> list[Start]:
    """All starts of a run in order; empty for a folder without any."""
    path = run / "ledger" / STARTS_NAME
    if not path.is_file():
        return []
    return [Start(**{**line, "members": tuple(line["members"])}) for line in read_lines(path)]


class LedgerWriter:
    """One member's lines of one attempt."""

    def __init__(self, run: Path, member: str, attempt: int) -> None:
        self._file = LineFile(run / "ledger" / f"member-{member}.jsonl")
        self._attempt = attempt

    def commit(self, step: int, epoch: int, start: int, stop: int, ids: Iterable[int]) -> None:
        """``ids``: this member's own samples of the committed step, whose batch is ``[start, stop)`` of ``epoch``."""
        self._file.append(
            {"attempt": self._attempt, "step": step, "epoch": epoch, "range": [start, stop], "ids": list(ids)}
        )

    def sync(self) -> None:
        """Returns when all lines are on the disk; a checkpoint must not be older than they are."""
        self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass(frozen=True)
class EpochAudit:
    """One epoch: samples that the committed steps must have fed, that they fed, and the faults among them."""

    epoch: int
    expected: int
    seen: int
    missing: int
    repeated: int


@dataclass(frozen=True)
class Audit:
    """The outcome: ``ok`` where every committed sample came exactly once in its epoch."""

    ok: bool
    steps: int
    epochs: tuple[EpochAudit, ...]
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **asdict(self),
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "faults": list(self.faults),
        }


@dataclass(frozen=True)
class _Line:
    attempt: int
    member: str
    step: int
    epoch: int
    start: int
    stop: int
    ids: tuple[int, ...]


def audit(run: Path) -> Audit:
    """Compares the ledger of a run folder with what its epochs must hold.

    Raises:
        UserError: the folder is no run, or has no ledger.
    """
    starts = read_starts(run)
    if not starts:
        raise UserError(f"{run} holds no ledger; expected a run folder, as `stretto train` makes it")
    lines = [line for path in sorted((run / "ledger").glob("member-*.jsonl")) for line in _read(path)]
    committed, faults = _committed(starts, lines)
    samples = {start.attempt: start.samples for start in starts}
    epochs = []
    for epoch in sorted({line.epoch for line in committed}):
        own = [line for line in committed if line.epoch == epoch]
        finished = epoch < max(line.epoch for line in committed)
        report, found = _audit_epoch(epoch, own, samples[max(line.attempt for line in own)], finished)
        epochs.append(report)
        faults += found
    steps = len({line.step for line in committed})
    return Audit(not faults, steps, tuple(epochs), tuple(faults))


def _read(path: Path) -> list[_Line]:
    member = path.stem.removeprefix("member-")
    return [
        _Line(r["attempt"], member, r["step"], r["epoch"], r["range"][0], r["range"][1], tuple(r["ids"]))
        for r in read_lines(path)
    ]


def _committed(starts: list[Start], lines: list[_Line]) -> tuple[list[_Line], list[str]]:
    """The lines that count: not voided by a later start, and of a step that every member recorded.

    The very last step may lack a member's line where a kill fell between the vote and the write; it is left out. A gap
    anywhere else is a fault.
    """
    bound = {start.attempt: min([s.from_step for s in starts if s.attempt > start.attempt], default=None)
             for start in starts}  # fmt: skip
    valid = [line for line in lines if (limit := bound.get(line.attempt)) is None or line.step <= limit]
    members = {start.attempt: set(start.members) for start in starts}
    by_step: dict[int, set[str]] = {}
    for line in valid:
        by_step.setdefault(line.step, set()).add(line.member)
    attempt_of = {line.step: line.attempt for line in valid}
    last = max(by_step, default=0)
    partial = {step for step, found in by_step.items() if found != members.get(attempt_of[step])}
    faults = [f"step {step}: not every member recorded it" for step in sorted(partial) if step != last]
    faults += [f"step {step} is not in the ledger" for step in range(1, last) if step not in by_step]
    return [line for line in valid if line.step not in partial or line.step != last], faults


def _audit_epoch(epoch: int, lines: list[_Line], samples: int, finished: bool) -> tuple[EpochAudit, list[str]]:
    counts = Counter(index for line in lines for index in line.ids)
    expected = samples if finished else max(line.stop for line in lines)
    repeated = sorted(index for index, count in counts.items() if count > 1)
    strangers = [index for index in counts if not 0 <= index < samples]
    missing = max(0, expected - len(counts))
    faults = [f"epoch {epoch}: sample {index} came {counts[index]} times" for index in repeated[:10]]
    faults += [f"epoch {epoch}: sample {index} is not in the dataset" for index in strangers[:10]]
    faults += [f"epoch {epoch}: {missing} of {expected} samples never came"] if missing else []
    return EpochAudit(epoch, expected, len(counts), missing, len(repeated)), faults
