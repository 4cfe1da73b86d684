"""What can go wrong, told for people.

A :class:`UserError` is a mistake the user can mend. It is printed as one line (expected, got, what to do),
without a traceback, and ends the command with exit code 2. Everything else is a program's error and keeps its
whole traceback. :class:`PeerLost` is neither: it is what the others see when one member dies, so it is never
reported as the cause while a real cause is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend; ``str(error)`` is the whole line to print."""

    exit_code = 2


class TaskError(UserError):
    """The task file does not keep the contract of a task."""


class RecipeError(UserError):
    """A recipe field has no valid value."""


class PlanError(UserError):
    """A plan is misspelt, contradicts itself, or does not fit the cluster."""


class Refused(PlanError):
    """A valid plan that would change this task's numbers, or that is not built yet; refused before launch."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or cannot be written."""


class LaunchError(UserError):
    """Workers cannot be started as asked."""


class LoaderError(UserError):
    """A data loader's process died, can't be started, or can't hand over its samples."""


class Interrupted(UserError):
    """A Ctrl-C or SIGTERM ended what was asked; no mistake, but told as shortly."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("interrupted")
        self.exit_code = exit_code


class PeerLost(Exception):
    """A collective ended because another member died or the group was broken: a consequence, not a cause."""


class ProbeFailed(Exception):
    """A probe could not be made; what it would have told is unknown."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest valid name, or ``""`` where none is close."""
    found = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.5)
    # Of two that are as near, the one that begins alike: people mistype the first letter least.
    found.sort(key=lambda one: (-difflib.SequenceMatcher(None, one, name).ratio(), one[:1] != name[:1]))
    return f"; did you mean {found[0]!r}?" if found else ""


def one_line(text: object) -> str:
    """The text folded to a single line, for messages that promise one."""
    return " ".join(str(text).split())
