"""The named points of a save, in order. Fault injection hooks in here: a process may die at each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OnPoint = Callable[[str], None]

MEMBER_POINTS: Final = (
    "partial-created",
    "member-file-begin",
    "member-file-half",
    "member-file-written",
    "member-file-fsynced",
    "member-report-half",
    "member-report-written",
)
"""What every member passes."""

COMMITTER_POINTS: Final = (
    "members-complete",
    "manifest-half",
    "manifest-written",
    "folder-fsynced",
    "moved-aside",  # only where a folder of this step was there before
    "renamed",
    "committed",
    "acknowledged",
    "prune-hidden",  # once for each checkpoint that is pruned
    "pruned",
    "swept",
)
"""What the committer passes after its own part."""


def no_point(name: str) -> None:
    """The default: nothing happens at a point."""
