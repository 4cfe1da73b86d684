"""The plan that trains a task fastest on the workers that there are, found before anything is launched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stretto.corrections import Corrections
from stretto.errors import UserError
from stretto.plan import RECOMPUTE, Plan
from stretto.planner.candidates import candidates
from stretto.planner.replay import Prices
from stretto.planner.risk import probability_over

if TYPE_CHECKING:
    from stretto.rehearse import Rehearsals

UNSEEN: Final = "not looked at"
RISK: Final = 0.5  # of not fitting, from which on a plan isn't chosen


@dataclass(frozen=True)
class Choice:
    """What is predicted of a plan.

    Args:
        seconds: of a step; ``work``: of those, of the rank that works longest.
        exposed: seconds of that rank in which it only communicates or waits, by kind of call.
        memory_bytes: the most that a worker has.
            All of these as earlier runs on this machine correct them.
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Choice:
        """The reverse of :meth:`to_json`."""
        if "refused" in values:
            return cls(values["plan"], refused=values["refused"])
        keys = ("plan", "step_seconds", "work_seconds", "exposed_seconds", "memory_bytes", "probability_over")
        return cls(*(values[key] for key in keys))


@dataclass(frozen=True)
class Planner:
    """What predicts a task's plans.

    Args:
        limit: bytes that a worker may have.
        corrections: of what is predicted, see :mod:`stretto.corrections`.
    """

    of: Rehearsals
    prices: Prices
    limit: float | None = None
    corrections: Corrections = field(default_factory=Corrections)

    def predict(self, plan: Plan) -> Choice:
        """One plan. Raises UserError where a rank's process ended by itself."""
        found = self.of.run(plan)
        if found.refused:
            return Choice(str(plan), refused=found.refused)
        step, factors = found.play(self.prices), self.corrections
        busiest = max(range(len(step.work)), key=step.work.__getitem__)
        work = step.work[busiest]
        memory = int(factors.memory * max(found.memory_bytes))
        return Choice(
            str(plan),
            factors.seconds(work, step.seconds - work),
            factors.work * work,
            {kind: factors.waits * seconds for kind, seconds in step.exposed[busiest].items()},
            memory,
            probability_over(memory, self.limit),
        )

    def choose(
        self, workers: int, tell: Callable[[Choice], None] = lambda choice: None, seconds: float = math.inf
    ) -> list[Choice]:
        """All plans for so many workers, the one to take first: those that fit by their time, then those that may not
        fit by their memory, then those that are refused. What costs time to save memory is looked at only where nothing
        fits without it.

        Args:
            tell: is told of each as it comes.
            seconds: after so many of looking, the plans that are left are refused for that reason.

        Raises:
            UserError: no plan trains the task on so many workers.
            RehearsalError: a rank's process ended by itself.
        """
        began, found = time.perf_counter(), list[Choice]()
        for recompute in RECOMPUTE:
            for plan in candidates(workers, self.of.task.recipe.batch, recompute):
                if (spent := time.perf_counter() - began) > seconds and fitting(found):
                    found.append(Choice(str(plan), refused=f"{UNSEEN}, for looking had taken {spent:.0f} s"))
                    continue
                found.append(self.predict(plan))
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
