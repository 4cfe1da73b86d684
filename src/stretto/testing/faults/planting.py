"""How faults are planted, and where they strike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

FAULTY_STEP: Final = 2
"""Faults of a single step happen at this one, so that it must be found, not guessed."""
FAULTY_RANK: Final = 1
"""Faults of a single rank happen on this one."""


class Lone:
    """Stands for members of which there is only one."""

    rank: Final = 0
    size: Final = 1


def change_decision(change: Callable[[Any], Any]) -> None:
    """Lets ``change`` replace what the vote decides."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        return change(honest(self, step, terms))

    Stepper._vote = vote  # type: ignore[method-assign]


def change_update(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Lets ``change`` replace the gradients of the faulty step's update; None leaves the update out."""
    from stretto.parallel import BoundOptimizer

    honest, calls = BoundOptimizer.step, [0]

    def step(self: Any, gradients: Mapping[str, Any]) -> None:
        calls[0] += 1
        changed = change(dict(gradients)) if calls[0] == FAULTY_STEP else gradients
        if changed is not None:
            honest(self, changed)

    BoundOptimizer.step = step  # type: ignore[method-assign]


def note_batches(into: list[tuple[int, ...]]) -> None:
    """Notes the ids of every global batch that is stepped on."""
    from stretto.step import Stepper

    honest = Stepper.step

    def step(self: Any, batch: Any) -> Any:
        into.append(batch.ids)
        return honest(self, batch)

    Stepper.step = step  # type: ignore[method-assign]
