"""The best plans of a space, exactly: it passes over only cores none of whose plans can be among the best.

Of each core one bound says what its work alone takes, and a second what its fastest plan would take if memory were no
matter. Cores are looked at in the order of the first, those that come together are opened in the order of the second,
and each ends where the next bound is over the time of the last plan that is asked for. Cores none of whose plans fits
are never opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from stretto.errors import UserError
from stretto.planner.memory import Memory
from stretto.planner.score import Scorer
from stretto.planner.setups import Array, Setups
from stretto.planner.space import CHUNK, Places
from stretto.planner.step import StepTime

LOOKED: Final = 2**11  # cores whose second is
OPENED: Final = 2**6  # cores opened at once: each has up to some hundreds of plans
_SLACK: Final = 1 + 1e-9  # by which rounding may put a bound over the time that it bounds


@dataclass(frozen=True)
class Found:
    """The best plans, the best first.

    Args:
        setups: of each way to cut the devices (dp, tp, pp, cp), with full recomputation and without, the best plan.
        candidates: plans in the space; ``judged``: those whose time was computed, for the others a bound was enough.
    """

    setups: Setups
    times: StepTime
    memory: Memory
    risks: Array
    candidates: int
    judged: int


@dataclass
class _Best:
    """Of each way the best plan so far, by time, then memory, then place in the space."""

    most: int
    plans: dict[tuple[float, ...], tuple[float, float, int, int, int]]
    judged: int = 0

    @property
    def bar(self) -> float:
        """The time that a plan must beat, or equal, to matter."""
        times = sorted(plan[0] for plan in self.plans.values())
        return times[self.most - 1] if len(times) >= self.most else np.inf

    def add(self, setups: Setups, order: tuple[Array, Array, Places, Places, Places]) -> None:
        """Plans, with their time, memory, and place: of the core, of its options."""
        way = np.stack([setups.dp, setups.tp, setups.pp, setups.cp, setups.full])
        sorting = np.lexsort(order[::-1])
        self.judged += len(sorting)
        _, first = np.unique(way[:, sorting], axis=1, return_index=True)
        for at in sorting[first]:
            key, plan = tuple(way[:, at]), tuple(one[at].item() for one in order)
            self.plans[key] = min(self.plans.get(key, plan), plan)


def search(scorer: Scorer, most: int) -> Found:
    """The best plan of each of the ``most`` best ways; see :class:`Found`.

    Of plans that take as long the one with less memory is better, and of those the one that comes first in the space.

    Raises:
        UserError: no plan fits.
    """
    space = scorer.space
    cores, least, floors = space.cores, np.inf, [np.zeros(0)]
    for start in range(0, len(cores), CHUNK):
        floors.append(scorer.floor(cores.take(slice(start, start + CHUNK))))
    floor = np.concatenate(floors)
    order = np.argsort(floor, kind="stable")
    best = _Best(most, {})
    for start in range(0, len(order), LOOKED):
        at = order[start : start + LOOKED]
        at = at[floor[at] <= best.bar * _SLACK]
        if not len(at):
            break
        some = cores.take(at)
        allowed = space.allowed(some)
        fits, sizes = scorer.may_fit(some, allowed)
        least = min(least, float(sizes.min()))
        bounds = scorer.least_seconds(some.take(fits), (allowed[0][fits], allowed[1][fits]))
        _open(scorer, at[fits], bounds, best)
    if not best.plans:
        raise UserError(_nothing(scorer, least))
    core, way, cut = np.array([plan[2:] for plan in sorted(best.plans.values())[:most]]).T
    setups = space.join(cores.take(core), way, cut)
    memory = scorer.memory(setups)
    return Found(setups, scorer.time(setups), memory, scorer.risk(memory), space.candidates, best.judged)


def _open(scorer: Scorer, places: Places, bounds: Array, best: _Best) -> None:
    """Judges the plans of the cores at ``places``, as far as they matter."""
    space, order = scorer.space, np.argsort(bounds, kind="stable")
    for start in range(0, len(order), OPENED):
        some = order[start : start + OPENED]
        some = places[some[bounds[some] <= best.bar * _SLACK]]
        if not len(some):
            return
        cores = space.cores.take(some)
        ways, cuts = space.allowed(cores)
        core, way, cut = np.nonzero(ways[:, :, None] & cuts[:, None, :])
        setups = space.join(cores.take(core), way, cut)
        memory = scorer.memory(setups)
        fits = scorer.fits(memory)
        if fits.any():
            setups, places_of = setups.take(fits), (some[core[fits]], way[fits], cut[fits])
            best.add(setups, (scorer.time(setups).total, memory.total[fits], *places_of))


def _nothing(scorer: Scorer, least: float) -> str:
    space, machines = scorer.space, scorer.machines
    model, batch = space.described.model, space.batch
    if not space.candidates:
        limits = (
            f"tp divides {model.kv_heads} kv_heads, pp is at most {model.layers} layers, dp at most {batch} samples"
        )
        return f"no plan has work for all of {machines.count} devices: {limits}; use fewer devices or a larger --batch"
    has = f"a {machines.device.name} has {machines.device.memory_bytes / 1e9:.0f} GB"
    said = f"none of {space.candidates:,} plans is likely to fit on {machines.count} devices: the least takes"
    return f"{said} {least / 1e9:.1f} GB, and {has}; use more devices, a smaller model or a shorter sequence"
