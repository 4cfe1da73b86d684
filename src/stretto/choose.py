"""The plan that trains a task fastest on the workers that there are, found before anything is launched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stretto.corrections import Corrections
from stretto.errors import UserError
from stretto.observe import allocator
from stretto.plan import RECOMPUTE, Plan
from stretto.planner.candidates import candidates
from stretto.planner.replay import Prices
from stretto.planner.risk import probability_over, rehearsed

if TYPE_CHECKING:
    from stretto.rehearse import Rehearsals

UNSEEN: Final = "not looked at"
RISK: Final = 0.5  # of not fitting, from which on a plan isn't chosen


@dataclass(frozen=True)
class Room:
    """Memory of the worker that needs the most.

    Args:
        laid_out: bytes, once it has its part of the model; ``kept``: between steps; ``most``: ever.
        risk: the probability that it doesn't fit.
        spread: standard deviation of the logarithm of what will be measured over ``most``.
    """

    laid_out: int
    kept: int
    most: int
    risk: float = 0.0
    spread: float = 0.0

    @property
    def parts(self) -> dict[str, int]:
        """Of ``most``, which kind takes how much."""
        return {
            "weights": self.laid_out,
            "kept between steps": max(0, self.kept - self.laid_out),
            "within a step": max(0, self.most - max(self.kept, self.laid_out)),
        }


@dataclass(frozen=True)
class Choice:
    """What is predicted of a plan, as earlier runs on this machine correct it.

    Args:
        seconds: of a step; ``work``: of those, of the rank that works longest.
        exposed: seconds of that rank in which it only communicates or waits, by kind of call.
        quicker: seconds of a step if every call took half as long.
        samples: that the task has to train on.
        refused: why the plan doesn't fit the task; the rest is empty then.
    """

    plan: str
    seconds: float = math.nan
    work: float = math.nan
    exposed: dict[str, float] = field(default_factory=dict, hash=False)
    quicker: float = math.nan
    room: Room | None = None
    samples: int = 0
    refused: str = ""

    @property
    def memory_bytes(self) -> int:
        """The most that a worker has."""
        return self.room.most if self.room else 0

    @property
    def risk(self) -> float:
        """The probability that it doesn't fit."""
        return self.room.risk if self.room else 0.0

    @property
    def why(self) -> str:
        """Why it is refused, for where the plan itself is named beside it."""
        return self.refused.removeprefix(f"plan {self.plan}: ")

    @property
    def fits(self) -> bool:
        """Whether it may be chosen."""
        return not self.refused and self.risk < RISK

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        if self.refused or self.room is None:
            return {"plan": self.plan, "refused": self.refused}
        return {
            "plan": self.plan,
            "step_seconds": self.seconds,
            "work_seconds": self.work,
            "exposed_seconds": self.exposed,
            "step_seconds_of_twice_the_links": self.quicker,
            "memory_bytes": self.room.most,
            "memory_bytes_laid_out": self.room.laid_out,
            "memory_bytes_kept": self.room.kept,
            "memory_spread": self.room.spread,
            "probability_over": self.room.risk,
            "samples": self.samples,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Choice:
        """The reverse of :meth:`to_json`."""
        if "refused" in values:
            return cls(values["plan"], refused=values["refused"])
        laid_out, kept, most = (values[f"memory_bytes{which}"] for which in ("_laid_out", "_kept", ""))
        step, work, exposed = (values[f"{what}_seconds"] for what in ("step", "work", "exposed"))
        room = Room(laid_out, kept, most, values["probability_over"], values["memory_spread"])
        twice, samples = values["step_seconds_of_twice_the_links"], values["samples"]
        return cls(values["plan"], step, work, exposed, twice, room, samples)


@dataclass(frozen=True)
class _Twice:
    """Links that are twice as fast as others."""

    of: Prices

    @property
    def background(self) -> bool:
        return self.of.background

    def collective(self, *call: Any) -> float:
        return self.of.collective(*call) / 2

    def message(self, *call: Any) -> float:
        return self.of.message(*call) / 2

    def pace(self, rank: int) -> float:
        return self.of.pace(rank)


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
        quicker = found.play(_Twice(self.prices))
        laid_out, kept, most = (factors.memory * size for size in max(found.memory, key=lambda sizes: sizes[-1]))
        trust = rehearsed(found.varied, plan.traced, allocator())
        most = trust.most(most)
        spread = trust.spread_of(most)
        over = probability_over(most, self.limit, spread)
        return Choice(
            str(plan),
            factors.seconds(work, step.seconds - work),
            factors.work * work,
            {kind: factors.waits * seconds for kind, seconds in step.exposed[busiest].items()},
            factors.seconds(quicker.work[busiest], quicker.seconds - quicker.work[busiest]),
            Room(int(laid_out), int(kept), int(most), over, spread),
            found.samples,
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


def changes(choices: Sequence[Choice]) -> list[str]:
    """What would change the answer: links, and memory."""
    fits, possible = fitting(choices), [one for one in choices if not one.refused]
    best, by_links = fits[0], min(fits, key=lambda one: (one.quicker, one.plan))
    same = "the same plan" if by_links.plan == best.plan else by_links.plan
    told = [f"links twice as fast: {1e3 * by_links.quicker:.1f} ms with {same}"]
    larger = min(possible, key=lambda one: (one.seconds, one.plan))
    if larger.seconds < best.seconds:
        room = f"{larger.memory_bytes / 2**20:,.0f} MiB"
        return [*told, f"more memory, {room} a worker: {1e3 * larger.seconds:.1f} ms with {larger.plan}"]
    return [*told, "more memory: nothing"]


def frontier(choices: Sequence[Choice]) -> list[tuple[float, float]]:
    """(bytes, seconds) of the plans of which none takes both less memory and less time, by memory."""
    found: list[tuple[float, float]] = []
    for size, seconds in sorted((float(one.memory_bytes), one.seconds) for one in choices if not one.refused):
        if not found or seconds < found[-1][1]:
            found.append((size, seconds))
    return found


def _sum(one: Choice) -> float:
    return sum(one.exposed.values())


def _longest(one: Choice) -> str:
    return max(one.exposed, key=one.exposed.__getitem__, default="nothing")


def fitting(choices: Sequence[Choice]) -> list[Choice]:
    """Those that fit."""
    return [one for one in choices if one.fits]
