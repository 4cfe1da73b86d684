"""Tells a gradient that is not finite now and then from a run that has stopped learning."""

from __future__ import annotations

from typing import Final

from stretto.errors import UserError
from stretto.step import NOT_FINITE, StepOutcome

MAX_IN_A_ROW: Final = 50
"""So many halvings would bring any loss scale to nothing, so what is left is the weights' or the data's fault."""


class SkipWatch:
    """Fed with every outcome of one start of a run; the same on every rank, so all of them stop together."""

    def __init__(self) -> None:
        self._first: StepOutcome | None = None  # of the steps in a row
        self._in_a_row = 0
        self._learnt = False

    def see(self, outcome: StepOutcome) -> None:
        """Raises UserError where 50 steps in a row had a gradient that is not finite."""
        if outcome.skipped is None or not outcome.skipped.startswith(NOT_FINITE):
            self._first, self._in_a_row, self._learnt = None, 0, True
            return
        self._first = self._first or outcome
        self._in_a_row += 1
        if self._in_a_row == MAX_IN_A_ROW:
            raise self._told(self._first)

    def at_end(self) -> None:
        """Raises UserError where no step at all had a finite gradient."""
        if self._first is not None and not self._learnt:
            raise self._told(self._first)

    def _told(self, first: StepOutcome) -> UserError:
        last = first.step + self._in_a_row - 1
        return UserError(
            f"steps {first.step} to {last} were all skipped, as the gradient is not finite; the loss of step "
            f"{first.step} is {first.loss:g} at a learning rate of {first.learning_rate:g}: look for nan in the data, "
            "or lower the learning rate"
        )
