"""The plan that ``stretto train`` takes where none is named, and that of ``--plan auto``: found before the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stretto.choose import UNSEEN, Choice, fitting, ranked
from stretto.cli.plan_task import nothing_fits, room_of, tell_of
from stretto.cli.words import duration
from stretto.cluster import Cluster
from stretto.corrections import Corrections, corrections_of
from stretto.errors import UserError
from stretto.launch import LocalLauncher
from stretto.plan import Plan
from stretto.planning import Wanted, predict

SHARE: Final = 0.1  # of what a run takes by the best plan known, for looking further; where nobody asked to look
LEAST_SECONDS: Final = 8.0  # what looking further takes at least


@dataclass(frozen=True)
class Chosen:
    """A plan, why it was taken, and what is predicted of it, where anything is."""

    plan: Plan
    why: str
    forecast: dict[str, Any] | None = None


def choose_plan(
    launcher: LocalLauncher, task: Path, sets: Mapping[str, str], workers: int | None, runs: Path, thorough: bool
) -> Chosen:
    """The plan to take on this machine.

    Args:
        workers: so many; where none are named, as many as there are cores, or one.
        runs: a folder of runs, whose forecasts correct the next.
        thorough: every plan is looked at, however short the run is.

    Raises:
        UserError: the task can't be loaded, no plan trains it, or none fits.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    workers = workers or max(1, Cluster.measure().cores)
    wanted = Wanted(str(task), dict(sets), workers, corrections=corrections_of(runs))
    others: tuple[Choice, ...] = ()
    if not thorough:
        alone = predict(launcher, replace(wanted, plans=("dp=1",), limit=room_of(1)), lambda one: None)
        if not (others := alone.plans):
            return _unplanned(Plan())
        whole = others[0].seconds * alone.steps
        if others[0].fits and (workers == 1 or SHARE * whole < LEAST_SECONDS):
            why = f"one worker takes about {duration(whole)}; --plan auto looks further"
            return _chosen(others[0], why, wanted.corrections)
        wanted = replace(wanted, seconds=SHARE * whole)
    from stretto.doctor.links import measure_links  # needs torch, which a short run needn't wait for here

    wanted = replace(wanted, links=measure_links(workers, launcher), limit=room_of(workers))
    predicted = predict(launcher, wanted, tell_of)
    if not predicted.plans:
        return _unplanned(Plan(dp=workers))
    found = ranked([*others, *predicted.plans])
    if not (fits := fitting(found)):
        raise UserError(nothing_fits(found, wanted.limit))
    left = sum(one.refused.startswith(UNSEEN) for one in found)
    more = f"; to look at {left} more would take too much of this run" if left else ""
    return _chosen(fits[0], f"the best of {len(found) - left} plans{more}", wanted.corrections)


def _unplanned(plan: Plan) -> Chosen:
    """What ended the planning is most likely the task's own, and the run tells it whole."""
    return Chosen(plan, "it could not be planned; the run tells why")


def _chosen(one: Choice, why: str, corrections: Corrections) -> Chosen:
    if corrections.runs:
        why = f"{why}; {corrections.told()}"
    return Chosen(Plan.parse(one.plan), why, {**one.to_json(), "corrected": corrections.to_json()})
