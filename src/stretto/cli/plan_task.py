"""``stretto plan TASK``: the plans for a task on the workers of this machine, each rehearsed rank by rank."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from stretto.cli.options import find_task, parse_sets, write_picture
from stretto.cli.words import count, duration, size
from stretto.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.choose import Choice
    from stretto.planning import Predicted

SHOWN: Final = 10  # plans
_UNITS: Final = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}.items()


@dataclass(frozen=True)
class Asked:
    """What is asked beside plans.

    Args:
        explain: a plan to be judged alone; ``on``: a file of ``stretto doctor``.
        picture: a file for a picture of time against memory.
        price: dollars of a worker for an hour.
    """

    explain: str | None = None
    on: str | None = None
    picture: Path | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        """Raises UserError for what means nothing."""
        if self.picture is not None and not self.picture.absolute().parent.is_dir():
            raise UserError(f"--picture: {self.picture} can't be written: there is no folder {self.picture.parent}")
        if self.price is not None and self.price <= 0:
            raise UserError(f"--price {self.price:g}: expected dollars over 0")


def plan_task(
    task: str,
    sets: Sequence[str] | None,
    workers: int | None,
    memory: str | None,
    asked: Asked,
    json: bool,
) -> None:
    """Rehearses the plans, or one, and prints the best.

    Raises:
        UserError: none can be taken; also after they were printed.
    """
    from json import dumps

    from stretto.choose import fitting
    from stretto.cluster import Cluster
    from stretto.corrections import corrections_of
    from stretto.doctor.examine import read_known
    from stretto.doctor.links import measure_links
    from stretto.launch import LocalLauncher
    from stretto.plan import Plan
    from stretto.planning import Wanted, predict
    from stretto.preload import preloads

    given = None if asked.explain is None else Plan.parse(asked.explain, workers)
    known = None if asked.on is None else read_known(Path(asked.on))
    if known is not None and known.links.note:
        print(known.links.note, file=sys.stderr)
    number = workers or (given.world_size if given else known.workers if known else max(1, Cluster.measure().cores))
    if known is not None and number > known.workers:
        said = f"{asked.on} was measured with {known.workers} worker(s): calls among more are taken to last as long"
        print(said, file=sys.stderr)
    limit = parse_bytes(memory) if memory is not None else (known and known.room) or room_of(number)
    path, settings = str(find_task(task)), parse_sets(sets)
    # On several hosts others start the workers, in their own environment.
    with LocalLauncher(preloads(None), own_allocator=known is None or not known.links.per_host) as launcher:
        links = known.links if known is not None else measure_links(number, launcher)
        plans = () if given is None else (str(given),)
        wanted = Wanted(path, settings, number, plans, links, limit, corrections_of(Path("runs")))
        found = predict(launcher, wanted, tell_of)
    if found.failure is not None:
        print(found.failure, file=sys.stderr)
        raise typer.Exit(found.failure.exit_code)
    if found.failed:
        raise UserError(found.failed)
    if asked.picture is not None:
        _draw(found, asked.picture)
    if json:
        told = {"workers": number, "memory_limit_bytes": limit, "plans": [one.to_json() for one in found.plans]}
        print(dumps({**told, **_epoch(found, number, asked)}))
    elif any(not one.refused for one in found.plans):
        _print(found, number, limit, asked)
    if not fitting(found.plans):
        raise UserError(nothing_fits(found.plans, limit))


def room_of(workers: int) -> float | None:
    """Bytes that each worker may have of what is free; None where the system doesn't tell."""
    from stretto.observe import free_bytes

    return (free_bytes() or 0) / workers or None


def parse_bytes(text: str) -> float:
    """``2GiB``, ``500MB``, ``1.5g``. Raises UserError for anything else."""
    match = re.fullmatch(r"([\d.]+)\s*([BKMGT])(I?B?)", text.strip().upper())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise UserError(f"--memory {text}: expected a size such as 2GiB or 500MB")
    power = dict(_UNITS)[match[2]]
    return float(float(match[1]) * (1024 if match[3].startswith("I") else 1000) ** power)


def tell_of(one: Choice) -> None:
    """Each plan, on standard error, as it comes."""
    said = f"refused: {one.why}" if one.refused else f"{1e3 * one.seconds:.1f} ms"
    print(f"{one.plan}: {said}", file=sys.stderr)


def _draw(found: Predicted, file: Path) -> None:
    from stretto.choose import frontier
    from stretto.planner.picture import draw

    points = frontier(found.plans)
    if not points:
        raise UserError("--picture: every plan is refused, so there is nothing to draw")
    write_picture(file, draw(points, None, "plans by the memory of a worker"))


def _epoch(found: Predicted, workers: int, asked: Asked) -> dict[str, float]:
    """Of the plan to take, once through the data; nothing where none fits."""
    from stretto.choose import fitting

    if not (fits := fitting(found.plans)):
        return {}
    rate = found.batch / fits[0].seconds
    hours = fits[0].samples / rate / 3600
    known = {"samples_per_second": rate, "epoch_hours": hours}
    return known if asked.price is None else {**known, "epoch_dollars": hours * asked.price * workers}


def _print(found: Predicted, workers: int, limit: float | None, asked: Asked) -> None:
    from stretto.choose import fitting

    shown = [one for one in found.plans if not one.refused][:SHOWN]
    wide = max((len(one.plan) for one in shown), default=4)
    room = "" if limit is None else f", each with {size(int(limit))} of memory"
    print(f"{len(found.plans)} plan(s) for {workers} worker(s){room}\n")
    titles = f"{'a step':>10}  {'of it work':>10}  {'waiting':>10}  {'samples/s':>9}  {'memory':>8}  no fit"
    print(f"{'plan':<{wide}}  {titles}")
    for one in shown:
        times = "  ".join(f"{1e3 * took:>7.1f} ms" for took in (one.seconds, one.work, one.seconds - one.work))
        rate = count(found.batch / one.seconds)
        print(f"{one.plan:<{wide}}  {times}  {rate:>9}  {size(one.memory_bytes):>8}  {one.risk:>6.0%}")
    for why, plans in _refusals(found.plans).items():
        print(f"{', '.join(plans[:2])}{f' and {len(plans) - 2} more' if len(plans) > 2 else ''}: {why}")
    if fits := fitting(found.plans):
        _print_best(found, fits, workers, asked)


def _refusals(plans: Sequence[Choice]) -> dict[str, list[str]]:
    """Of each reason the plans that are refused for it."""
    found: dict[str, list[str]] = {}
    for one in plans:
        if one.refused:
            found.setdefault(one.why, []).append(one.plan)
    return found


def nothing_fits(plans: Sequence[Choice], limit: float | None) -> str:
    """Why there is none to take."""
    from stretto.choose import RISK

    possible = [one for one in plans if not one.refused]
    if not possible:
        return f"{plans[0].plan}: {plans[0].why}"
    least = min(possible, key=lambda one: one.memory_bytes)
    said = f"none fits: each is likelier than {RISK:.0%} to run out of memory. The least, {least.plan}, takes"
    return f"{said} {size(least.memory_bytes)}, and a worker has {size(int(limit or 0))}"


def _print_best(found: Predicted, fits: Sequence[Choice], workers: int, asked: Asked) -> None:
    from stretto.choose import binds, changes, why_second

    best = fits[0]
    print(f"\ntake --plan {best.plan}: what binds is {binds(best)}")
    waits = {kind: took for kind, took in sorted(best.exposed.items(), key=lambda one: -one[1]) if took > 5e-5}
    parts = ", ".join(f"{kind} {1e3 * took:.1f}" for kind, took in {"work": best.work, **waits}.items())
    print(f"  ms: {parts}")
    if best.room:
        print("  memory: " + ", ".join(f"{size(part)} {kind}" for kind, part in best.room.parts.items()))
    if len(fits) > 1:
        print(f"  {why_second(best, fits[1])}")
    for told in changes(found.plans):
        print(f"  {told}")
    once = _epoch(found, workers, asked)
    dollars = f", {once['epoch_dollars']:,.2f} dollars" if "epoch_dollars" in once else ""
    print(f"  an epoch of {best.samples:,} samples: {duration(3600 * once['epoch_hours'])}{dollars}")
