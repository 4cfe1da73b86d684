"""The plan that trains a task fastest on the workers that there are, found before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stretto.errors import UserError
from stretto.plan import RECOMPUTE, Plan
from stretto.planner.candidates import candidates
from stretto.planner.replay import Prices
from stretto.rehearse import Rehearsals

SPREAD: Final = 0.03  # of a measured peak over the predicted one (standard deviation; benchmarks/planner/here.py)
RISK: Final = 0.5  # of not fitting, from which on a plan isn't chosen


@dataclass(frozen=True)
class Choice:
    """What is predicted of a plan.

    Args:
        seconds: of a step; ``work``: of those, of the rank that works longest.
        exposed: seconds of that rank in which it only communicates or waits, by kind of call.
        memory_bytes: the most that a worker has.
        risk: the probability that it doesn't fit.
        refused: why the plan doesn't fit the task; the rest is empty then.
    """

    plan: str
    seconds: float = math.nan
    work: float = math.nan
    exposed: dict[str, float] = field(default_factory=dict, hash=False)
    memory_bytes: int = 0
    risk: float = 0.0
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether it may be chosen."""
        return not self.refused and self.risk < RISK

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        if self.refused:
            return {"plan": self.plan, "refused": self.refused}
        return {
            "plan": self.plan,
            "step_seconds": self.seconds,
            "work_seconds": self.work,
            "exposed_seconds": self.exposed,
            "memory_bytes": self.memory_bytes,
            "probability_over": self.risk,
        }


def probability_over(memory_bytes: float, limit: float | None, spread: float = SPREAD) -> float:
    """That a worker needs more than it may have; the logarithm of the error is taken to be normal."""
    if limit is None:
        return 0.0
    return 0.5 * math.erfc(math.log(limit / max(1.0, memory_bytes)) / spread / math.sqrt(2))


def predict(of: Rehearsals, plan: Plan, prices: Prices, limit: float | None = None) -> Choice:
    """One plan. Raises UserError where a rank's process ended by itself.

    Args:
        limit: bytes that a worker may have.
    """
    found = of.run(plan)
    if found.refused:
        return Choice(str(plan), refused=found.refused)
    step = found.play(prices)
    busiest = max(range(len(step.work)), key=step.work.__getitem__)
    memory = max(found.memory_bytes)
    risk = probability_over(memory, limit)
    return Choice(str(plan), step.seconds, step.work[busiest], step.exposed[busiest], memory, risk)


def choose(
    of: Rehearsals,
    workers: int,
    prices: Prices,
    limit: float | None = None,
    tell: Callable[[Choice], None] = lambda choice: None,
) -> list[Choice]:
    """All plans for so many workers, the one to take first: those that fit by their time, then those that may not fit
    by their memory, then those that are refused. What costs time to save memory is looked at only where nothing fits
    without it.

    Args:
        tell: is told of each as it comes.

    Raises:
        UserError: no plan trains the task on so many workers, or a rank's process ended by itself.
    """
    found: list[Choice] = []
    for recompute in RECOMPUTE:
        for plan in candidates(workers, of.task.recipe.batch, recompute):
            found.append(predict(of, plan, prices, limit))
            tell(found[-1])
        if fitting(found):
            break
    if all(one.refused for one in found):
        raise UserError(f"no plan trains this task on {workers} workers; of {found[0].plan}: {found[0].refused}")
    return ranked(found)


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Best first; of equal ones the plan that comes first by its name."""

    def key(one: Choice) -> tuple[Any, ...]:
        if one.refused:
            return 2, 0.0, one.plan
        return (0, one.seconds, one.plan) if one.fits else (1, one.memory_bytes, one.plan)

    return sorted(choices, key=key)


def why_second(first: Choice, second: Choice) -> str:
    """Why the runner-up loses."""
    work, waits = second.work - first.work, _sum(second) - _sum(first)
    slower = 1e3 * (second.seconds - first.seconds)
    what = "its ranks work longer" if work >= waits else f"it waits longer ({_longest(second)})"
    return f"{second.plan} takes {slower:.1f} ms more: {what}"


def binds(choice: Choice) -> str:
    """Which limit binds."""
    if choice.work >= 0.7 * choice.seconds:
        return "compute"
    return f"messages and waiting ({_longest(choice)})"


def _sum(one: Choice) -> float:
    return sum(one.exposed.values())


def _longest(one: Choice) -> str:
    return max(one.exposed, key=one.exposed.__getitem__, default="nothing")


def fitting(choices: Sequence[Choice]) -> list[Choice]:
    """Those that fit."""
    return [one for one in choices if one.fits]
