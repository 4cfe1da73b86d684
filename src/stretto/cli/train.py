"""``stretto train``: a new run of a task."""

from __future__ import annotations

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
    from stretto.order import TrainOrder
    from stretto.plan import Plan

    forecast, by_planner = None, plan == "auto"
    if by_planner:
        from stretto.cli.plan_task import choose_plan

        chosen, forecast = choose_plan(task, sets, workers)
        plan = str(chosen)
    chosen = Plan.parse(plan or "", workers)
    given = parse_sets(sets)
    path = find_task(task)
    name = path.parent.name if path.name == "task.py" else path.stem
    with HeldFolder.new(run, name) as folder:
        order = TrainOrder(
            task=str(path),
            sets=dict(given),
            plan=str(chosen) if "dp" in (plan or "") or not plan else f"dp={chosen.dp},{plan}",
            plan_origin="planner" if by_planner else "--plan" if plan else "--workers" if workers else "default",
            run=str(folder.path),
            stop_after=stop_after,
            force=force,
            forecast=forecast,
            hang_after=hang_seconds(hang_after),
        )
        note = without_effect(hang_after, chosen.world_size)
        code = launch_training(Launch(order, chosen, task, tuple(sets or ()), note=note), quiet=json)
    raise typer.Exit(code)
