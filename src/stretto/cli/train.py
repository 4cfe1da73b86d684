"""``stretto train``: a new run of a task."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import (
    ForceOption,
    HangOption,
    JsonOption,
    SetOption,
    StopAfterOption,
    TaskArgument,
    TrainPlanOption,
    WorkersOption,
    find_task,
    hang_seconds,
    parse_sets,
    without_effect,
)


def train_command(
    task: TaskArgument,
    workers: WorkersOption = None,
    plan: TrainPlanOption = None,
    sets: SetOption = None,
    stop_after: StopAfterOption = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run folder; else the next free runs/NAME.")
    ] = None,
    force: ForceOption = False,
    hang_after: HangOption = None,
    json: JsonOption = False,
) -> None:
    """Train a task on some workers."""
    from stretto.cli.launching import HeldFolder, Launch, launch_training
    from stretto.launch import LocalLauncher
    from stretto.order import TrainOrder
    from stretto.plan import Plan
    from stretto.preload import preloads

    by_planner = plan == "auto" or (plan is None and workers is None)
    named = None if by_planner else plan
    chosen, given = Plan.parse(named or "", workers), parse_sets(sets)
    path, found = find_task(task), None
    name = path.parent.name if path.name == "task.py" else path.stem
    with ExitStack() as held:
        folder, launcher = held.enter_context(HeldFolder.new(run, name)), None
        if by_planner:
            if not json:
                print("looking for a plan ...", flush=True)
            launcher = held.enter_context(LocalLauncher(preloads(None)))
            from stretto.cli.auto import choose_plan  # while the launcher's imports go on

            found = choose_plan(launcher, path, given, workers, folder.path.parent, thorough=plan == "auto")
            chosen, named = found.plan, str(found.plan)
            if set(preloads(chosen)) > set(preloads(None)):
                launcher.close()
                launcher = None
        order = TrainOrder(
            task=str(path),
            sets=dict(given),
            plan=str(chosen) if "dp" in (named or "") or not named else f"dp={chosen.dp},{named}",
            plan_origin="planner" if by_planner else "--plan" if named else "--workers",
            run=str(folder.path),
            stop_after=stop_after,
            force=force,
            forecast=found.forecast if found else None,
            hang_after=hang_seconds(hang_after),
        )
        notes = [without_effect(hang_after, chosen.world_size)]
        if found:
            notes.append(f"plan {chosen}: {found.why}")
        launch = Launch(order, chosen, task, tuple(sets or ()), notes=notes)
        code = launch_training(launch, quiet=json, launcher=launcher)
    raise typer.Exit(code)
