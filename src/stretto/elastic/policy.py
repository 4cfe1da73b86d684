"""A worker's bad end is a question; a policy answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Decision = Literal["stop", "continue", "respawn"]


class Policy(Protocol):
    """Asked once for each bad end, unless the job is ending already."""

    def on_end(self, member: str, status: int) -> Decision:
        """What follows from the end of ``member``.

        Args:
            member: the id of the member that ended.
            status: its exit status; negative for the signal that ended it.

        Returns:
            ``stop``: the others are ended too, and the job. ``continue``: the others are left alone; the job still
            ends with this failure. ``respawn``: the others are ended, then as many new members start afresh.
        """
        ...


@dataclass(frozen=True)
class StopOnFailure:
    """The first bad end stops the job."""

    def on_end(self, member: str, status: int) -> Decision:
        """Stop, whoever it was."""
        return "stop"
