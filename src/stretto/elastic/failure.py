"""What a member's bad end was, and which of several bad ends was the cause of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["user", "program", "signal", "hang"]


@dataclass(frozen=True)
class Failure:
    """One member's bad end.

    Args:
        member: its id; ``host`` for what failed before there were members.
        rank: its rank, or None for the host.
        kind: ``user`` (a mistake to mend, one line), ``program`` (a whole traceback), ``signal`` and ``hang`` (one
            line).
        text: what to print.
        exit_code: what the command should end with; never 0.
        coordinates: the member's place on the mesh, such as ``dp=1``, where it said so; of the host, what it was at.
        time: when, in seconds of the monotonic clock that all processes of a machine share.
        consequence: it only saw that another member, or the group, had gone.
    """

    member: str
    rank: int | None
    kind: FailureKind
    text: str
    exit_code: int
    coordinates: str = ""
    time: float = 0.0
    consequence: bool = False

    def where(self) -> str:
        """``rank 1 (member m2, dp=1)``, or ``host (before there were workers)``."""
        if self.rank is None:
            return f"{self.member} ({self.coordinates})" if self.coordinates else self.member
        return f"rank {self.rank} (member {self.member}{', ' if self.coordinates else ''}{self.coordinates})"

    def __str__(self) -> str:
        """What to print last: a user's mistake is one line, a traceback stands whole under the place it came from."""
        return f"{self.where()} failed:\n{self.text}" if self.kind == "program" else self.text


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not the consequence of another; the earliest of all where every one is."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)
