"""``stretto resume``: the next start of a run, on as many workers as there are today."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stretto.cli.options import (
    ForceOption,
    HangOption,
    JsonOption,
    PlanOption,
    RunArgument,
    StopAfterOption,
    WorkersOption,
    hang_seconds,
    parse_sets,
    shown_path,
    without_effect,
)
from stretto.errors import CheckpointError, UserError, nearest

if TYPE_CHECKING:
    from stretto.plan import Plan
    from stretto.runfolder import Resolved

# What may change in the middle of a run: how long it goes and what it leaves behind, not the numbers so far.
CHANGEABLE: Final = ("steps", "eval_every", "save_every", "keep")


def resume_command(
    run: RunArgument,
    workers: WorkersOption = None,
    plan: PlanOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="steps, eval_every, save_every or keep; repeatable."),
    ] = None,
    stop_after: StopAfterOption = None,
    force: ForceOption = False,
    hang_after: HangOption = None,
    json: JsonOption = False,
) -> None:
    """Go on with a run from its newest whole checkpoint, on any number of workers."""
    from stretto.cli.launching import HeldFolder, Launch, has_checkpoint, launch_training
    from stretto.elastic.ledger import read_starts
    from stretto.order import TrainOrder
    from stretto.runfolder import read_resolved

    resolved = read_resolved(run)
    chosen, text, origin = choose_plan(resolved, plan, workers)
    changed = changed_sets(resolved, parse_sets(sets))
    with HeldFolder(run):
        if finished(run, json, changed.get("steps", "")):
            return
        task, note = find_kept_task(run, resolved)
        if not has_checkpoint(run):
            raise CheckpointError(f"{run} holds no checkpoint to go on from; start anew with `stretto train`")
        starts = read_starts(run)
        order = TrainOrder(
            task=str(task),
            sets={**resolved.values(), **changed},
            plan=text,
            plan_origin=origin,
            run=str(run),
            resume=True,
            attempt=starts[-1].attempt + 1 if starts else 1,
            stop_after=stop_after,
            force=force,
            hang_after=hang_seconds(hang_after),
        )
        repeated = (*given_sets(resolved, changed), *(sets or ()))
        notes = without_effect(hang_after, chosen.world_size), note
        launch = Launch(order, chosen, shown_path(task), repeated, first_member(run), notes)
        code = launch_training(launch, quiet=json)
    raise typer.Exit(code)


def choose_plan(resolved: Resolved, plan: str | None, workers: int | None) -> tuple[Plan, str, str]:
    """The plan, its text and its origin: what is given, else the run's own, with another ``dp`` for ``workers``.

    Raises:
        UserError: the run's loop is a script's own, so this command can't go on with it.
    """
    from stretto.plan import Plan
    from stretto.runfolder import START_ORIGIN

    if any(entry.get("origin") == START_ORIGIN for entry in resolved.plan.values()):
        raise UserError(
            "this run's loop is a script's own: go on with it there, by stretto.start(..., run=..., resume=True)"
        )
    if plan is not None:
        chosen = Plan.parse(plan, workers)
        return chosen, f"{chosen}", "--plan"
    old = Plan.of({key: entry["value"] for key, entry in resolved.plan.items()})
    if workers is None:
        return old, str(old), "as before"
    chosen = old.on(workers)
    return chosen, str(chosen), "--workers"


def changed_sets(resolved: Resolved, given: dict[str, str]) -> dict[str, str]:
    """``given``, where it leaves the numbers so far as they are. Raises UserError for anything else."""
    known = resolved.values()
    for key in given:
        if key in CHANGEABLE:
            continue
        if key not in known:
            raise UserError(f"--set {key}: this run has no such setting{nearest(key, known)}")
        raise UserError(
            f"--set {key}: a run keeps the numbers that it began with, so {key} stays {known[key]}; "
            f"{', '.join(CHANGEABLE)} may change. For other numbers begin a new run: `stretto train`"
        )
    return given


def finished(run: Path, quiet: bool, steps: str = "") -> bool:
    """Whether there is nothing left to do, which is told: a script may resume until it is so.

    Args:
        steps: a new number of steps, as given; more of them make a finished run go on.
    """
    import json

    from stretto.runfolder import SUMMARY_NAME

    try:
        summary: dict[str, Any] = json.loads((run / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not summary.get("finished") or (steps.isdecimal() and int(steps) > summary["steps"]):
        return False
    print(json.dumps(summary) if quiet else f"{run} is finished: all {summary['steps']:,} steps are done")
    return True


def find_kept_task(run: Path, resolved: Resolved) -> tuple[Path, str]:
    """The task's file where it was, else the copy that the run keeps; and what there is to say about it."""
    from stretto.taskfile import COPY_NAME, changes

    copy = run / COPY_NAME
    if resolved.task is None:
        raise UserError(f"{run} was started with a task that is no file; go on with it in its own script")
    path = Path(resolved.task)
    if not path.is_file():
        return copy.resolve(), f"{path} is gone; using the copy that the run keeps, {copy}"
    if changed := changes(run, path):
        return path, f"the task has changed since the run's last start, and goes on as it is now:\n{changed}"
    return path, ""


def given_sets(resolved: Resolved, changed: Collection[str] = ()) -> tuple[str, ...]:
    """What the run was first given by ``--set``, without what is ``changed`` now."""
    entries = {**resolved.settings, **resolved.recipe}.items()
    given = {key: entry["value"] for key, entry in entries if entry.get("origin") == "--set"}
    return tuple(f"{key}={value}" for key, value in given.items() if key not in changed)


def first_member(run: Path) -> int:
    """A number that no member of the run has had, whether or not it came to its first step."""
    names = [path.name for folder in ("events", "ledger", "logs") for path in (run / folder).glob("member-m*")]
    used = [int(match[1]) for name in names if (match := re.match(r"member-m(\d+)\.", name))]
    return max(used, default=0) + 1
