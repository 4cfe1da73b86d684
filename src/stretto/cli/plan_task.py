"""``stretto plan TASK``: the plans for a task on the workers of this machine, each rehearsed rank by rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from stretto.cli.options import find_task, parse_sets
from stretto.cli.words import size
from stretto.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.choose import Choice

SHOWN: Final = 10  # plans
_UNITS: Final = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}.items()


def plan_task(
    task: str,
    sets: Sequence[str] | None,
    workers: int | None,
    memory: str | None,
    plan: str | None,
    on: str | None,
    json: bool,
) -> None:
    """Rehearses the plans (or ``plan`` alone), and prints the best; ``on``: a file of ``stretto doctor``."""
    from json import dumps

    from stretto.cli.launching import conclude
    from stretto.cluster import Cluster
    from stretto.corrections import corrections_of
    from stretto.doctor.examine import read_links
    from stretto.doctor.links import measure_links
    from stretto.launch import LocalLauncher
    from stretto.plan import Plan
    from stretto.planning import Wanted, predict
    from stretto.preload import preloads

    given = None if plan is None else Plan.parse(plan, workers)
    known = None if on is None else read_links(Path(on))
    if known is not None and known[1].note:
        print(known[1].note, file=sys.stderr)
    count = workers or (given.world_size if given else known[0] if known else max(1, Cluster.measure().cores))
    limit = parse_bytes(memory) if memory is not None else room_of(count)
    path, settings = str(find_task(task)), parse_sets(sets)
    with LocalLauncher(preloads(None)) as launcher:
        links = known[1] if known is not None else measure_links(count, launcher)
        plans = () if given is None else (str(given),)
        wanted = Wanted(path, settings, count, plans, links, limit, corrections_of(Path("runs")))
        found = predict(launcher, wanted, tell_of)
    if found.result is not None:
        raise typer.Exit(conclude(found.result, None, None))
    if found.failed:
        raise UserError(found.failed)
    if json:
        print(dumps({"workers": count, "memory_limit_bytes": limit, "plans": [one.to_json() for one in found.plans]}))
        return
    _print(found.plans, count, limit)


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
    said = f"refused: {one.refused}" if one.refused else f"{1e3 * one.seconds:.1f} ms"
    print(f"{one.plan}: {said}", file=sys.stderr)


def _print(found: Sequence[Choice], workers: int, limit: float | None) -> None:
    from stretto.choose import RISK, binds, fitting, why_second

    shown = [one for one in found if not one.refused][:SHOWN]
    wide = max((len(one.plan) for one in shown), default=4)
    room = "" if limit is None else f", each with {size(int(limit))} of memory"
    print(f"{len(found)} plans for {workers} worker(s) of this machine{room}\n")
    print(f"{'plan':<{wide}}  {'a step':>10}  {'of it work':>10}  {'waiting':>10}  {'memory':>8}  too much")
    for one in shown:
        waits = sum(one.exposed.values())
        times = "  ".join(f"{1e3 * seconds:>7.1f} ms" for seconds in (one.seconds, one.work, waits))
        print(f"{one.plan:<{wide}}  {times}  {size(one.memory_bytes):>8}  {one.risk:>8.0%}")
    for one in found:
        if one.refused:
            print(f"{one.plan}: {one.refused}")
    fits = fitting(found)
    if not fits:
        if shown:
            print(f"\nnone fits: each would have more than {1 - RISK:.0%} of a chance to run out of memory")
        return
    print(f"\ntake --plan {fits[0].plan}: what binds is {binds(fits[0])}")
    if len(fits) > 1:
        print(why_second(fits[0], fits[1]))
