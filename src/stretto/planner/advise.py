"""What a user wants to know: the best plans, why they are the best, and what would change the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from stretto.errors import UserError
from stretto.planner.hardware import Machines
from stretto.planner.memory import Memory
from stretto.planner.plans import plan_of, setups_of
from stretto.planner.play import Played, Player
from stretto.planner.score import Scorer
from stretto.planner.search import Found, search

PLAYED: Final = 8  # plans that are ranked by events
PARTS: Final = (
    ("compute", "compute"),
    ("tensor", "messages of tp and cp"),
    ("stages", "messages of pp"),
    ("data", "messages of dp"),
    ("bubble", "bubble"),
    ("update", "optimizer"),
)
MEMORY: Final = tuple(field.name for field in dataclasses.fields(Memory))
_BINDS: Final = 0.02  # a limit binds if twice as much of it makes a step shorter by more


@dataclass(frozen=True)
class Advised:
    """One plan, judged.

    Args:
        parts: seconds of a step by what they are for; ``events``: whether they were played, or are the closed form's.
        memory: bytes by what they are for, on the rank that needs the most; ``risk``: the probability that they don't
            fit.
        mfu: share of the peak rate that the model's own flops have.
    """

    plan: str
    micro: int
    parts: dict[str, float]
    events: bool
    memory: dict[str, float]
    risk: float
    tokens_per_second: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def memory_bytes(self) -> float:
        """All of it."""
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**dataclasses.asdict(self), "seconds": self.seconds, "memory_bytes": self.memory_bytes}


@dataclass(frozen=True)
class Change:
    """What twice as much of something would do: the best plan there, and the share of a step's time that it saves."""

    what: str
    plan: str
    seconds: float
    saves: float


@dataclass(frozen=True)
class Advice:
    """The answer.

    Args:
        plans: the best first.
        binds: the limit that holds the best plan back most.
        candidates: plans in the space, of which ``judged`` were timed; for the others a bound was enough.
    """

    plans: tuple[Advised, ...]
    changes: tuple[Change, ...]
    binds: str
    candidates: int
    judged: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        plans = [one.to_json() for one in self.plans]
        return {**dataclasses.asdict(self), "plans": plans}


def advise(scorer: Scorer, most: int = 5) -> Advice:
    """The ``most`` best plans: the best by closed form, ranked by events.

    Raises:
        UserError: no plan fits.
    """
    found = search(scorer, max(most, PLAYED))
    plans = sorted(_advised(scorer, found, Player(scorer).play(found.setups)), key=lambda one: one.seconds)
    changes = _changes(scorer, found)
    saves = {one.what: one.saves for one in changes}
    limit = max(saves, key=lambda what: saves[what])
    binds = limit if saves[limit] > _BINDS else "none alone"
    return Advice(tuple(plans[:most]), changes, binds, found.candidates, found.judged)


def frontier(scorer: Scorer, steps: int = 12) -> list[tuple[float, float]]:
    """(bytes, seconds) of the fastest plans that do with less and less memory, by closed form."""
    points: list[tuple[float, float]] = []
    limit = scorer.space.machines.device.memory_bytes
    for _ in range(steps):
        device = dataclasses.replace(scorer.machines.device, memory_bytes=limit)
        machines = dataclasses.replace(scorer.machines, device=device)
        try:
            found = search(dataclasses.replace(scorer, rates=machines), 1)
        except UserError:  # nothing does with so little
            break
        points.append((float(found.memory.total[0]), float(found.times.total[0])))
        limit = 0.9 * points[-1][0]
    return points


def explain_plan(scorer: Scorer, text: str) -> tuple[Advised, Played | None]:
    """One plan, which need not be among the best, nor fit; and its events where it has a pipeline.

    Raises:
        PlanError: it is none, or not one for this model and cluster.
    """
    setups = setups_of(text, scorer.space)
    memory = scorer.memory(setups)
    found = Found(setups, scorer.time(setups), memory, scorer.risk(memory), 1, 1)
    played = Player(scorer).play(setups)
    return _advised(scorer, found, played)[0], played[0]


def _advised(scorer: Scorer, found: Found, played: Sequence[Played | None]) -> list[Advised]:
    space, plans = scorer.space, []
    described, machines = space.described, space.machines
    tokens = space.batch * described.sequence
    flops = tokens * described.model.flops_per_token(described.sequence)
    peak = machines.device.peak_of(described.precision) * machines.count
    for at, events in enumerate(played):
        parts = {name: float(getattr(found.times, key)[at]) for key, name in PARTS}
        if events is not None:
            _wait(parts, events.seconds)
        seconds = sum(parts.values())
        memory = {name: float(getattr(found.memory, name)[at]) for name in MEMORY}
        plan, micro, risk = plan_of(found.setups, at), int(found.setups.micro[at]), float(found.risks[at])
        rates = tokens / seconds, flops / seconds / peak
        plans.append(Advised(plan, micro, parts, events is not None, memory, risk, *rates))
    return plans


def _wait(parts: dict[str, float], seconds: float) -> None:
    """What events add to the closed form, or save, is waiting: for other stages, and for their messages; in place."""
    waits = seconds - sum(parts.values()) + parts["bubble"] + parts["messages of pp"]
    parts["messages of pp"] = min(parts["messages of pp"], max(0.0, waits))
    parts["bubble"] = max(0.0, waits - parts["messages of pp"])
    parts["compute"] += min(0.0, waits)


def _changes(scorer: Scorer, found: Found) -> tuple[Change, ...]:
    """By closed form on both sides, for that is what a search compares."""
    best, changes = float(found.times.total[0]), []
    for what, machines in _twice(scorer.space.machines).items():
        other = search(dataclasses.replace(scorer, rates=machines), 1)
        seconds = float(other.times.total[0])
        changes.append(Change(what, plan_of(other.setups, 0), seconds, 1 - seconds / best))
    return tuple(changes)


def _twice(machines: Machines) -> dict[str, Machines]:
    device, replace = machines.device, dataclasses.replace
    peak = {precision: 2 * rate for precision, rate in device.peak.items()}
    found = {
        "memory": replace(machines, device=replace(device, memory_bytes=2 * device.memory_bytes)),
        "compute rate": replace(machines, device=replace(device, peak=peak)),
        "memory's rate": replace(machines, device=replace(device, memory_rate=2 * device.memory_rate)),
        "links in a host": replace(machines, device=replace(device, link_rate=2 * device.link_rate)),
        "links between hosts": replace(machines, network_rate=2 * machines.network_rate),
    }
    hosts = -(-machines.count // machines.per_host)
    drop = ("links between hosts",) * (hosts == 1) + ("links in a host",) * (machines.per_host == 1)
    return {what: one for what, one in found.items() if what not in drop}
