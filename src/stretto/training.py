"""The two entrances to one engine: ``start`` for a script's own loop, ``prepare`` and ``work`` for the launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from stretto.assemble import build_template, check_same_model
from stretto.checkpoint import Checkpoint, list_checkpoints, newest_whole
from stretto.cluster import Cluster
from stretto.comm.group import Group, Rendezvous
from stretto.elastic.ledger import read_starts
from stretto.errors import LaunchError, PlanError, TaskError, UserError, one_line
from stretto.launch.context import WorkerContext, attach, current
from stretto.loop import train
from stretto.observe import rss_bytes
from stretto.order import TrainOrder
from stretto.parallel.apply import check
from stretto.plan import Plan
from stretto.prelaunch import Verdict, examine, settle, since
from stretto.prepared import Prepared, RunOptions
from stretto.run import Run
from stretto.runfolder import (
    RESOLVED_NAME,
    START_ORIGIN,
    Resolved,
    create_run_folder,
    read_resolved,
    write_resolved,
)
from stretto.task import Setting, Task, load_task
from stretto.taskfile import changes, keep_sources, task_being_loaded

UNWATCHED: Final = (
    "nobody looks for hangs here, as other programs than stretto started the workers; a call that waits for others for "
    "30 min ends them"
)

Report = Callable[[dict[str, Any]], None]


def prepare(payload: dict[str, Any], report: Report) -> Prepared:
    """Loads the task, really builds the model and picks the checkpoint: once a host, before its workers are forked."""
    order = TrainOrder(**payload)
    run = Path(order.run)
    task = load_task(order.task, order.sets)
    plan = Plan.parse(order.plan)
    prepared = _prepare(task, plan, _newest(run, report) if order.resume else None)
    first_step = prepared.checkpoint.step + 1 if prepared.checkpoint else 1
    if order.stop_after is not None and order.stop_after < first_step and order.resume:
        raise UserError(
            f"--stop-after {order.stop_after}: this run has committed {first_step - 1} steps; give a later step"
        )
    if task.recipe.steps < first_step - 1:
        raise UserError(f"steps={task.recipe.steps}: this run has committed {first_step - 1} steps; give more")
    before = read_resolved(run) if order.resume else None
    verdict = examine(task, plan, lambda: prepared.template.structure, run)
    prepared = replace(prepared, law=since(before, settle(verdict, order.force, "--force", report)))
    resolved = _resolve(prepared, order.plan, order.plan_origin)
    if before is not None:
        if task.has("schedule") and (steps := before.recipe["steps"]["value"]) != task.recipe.steps:
            text = f"schedule() was told {steps} steps, and is told {task.recipe.steps} from now on"
            report({"kind": "note", "text": text})
        resolved = _with_first_origins(resolved, before)
    write_resolved(run, resolved)
    if task.path is not None:
        keep_sources(run, task.path)
    report({"kind": "resolved", "rows": _rows(resolved), "run": order.run})
    return prepared


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """One worker of ``stretto train``: the plain loop over a run. Returns the summary."""
    order, prepared = TrainOrder(**payload), context.prepared
    options = RunOptions(Path(order.run), order.attempt, order.stop_after, order.forecast)
    return train(open_run(prepared, options, context, form_group(prepared.plan, context)))


def start(
    task: str | Path | ModuleType | Any,
    *,
    plan: str | Plan | None = None,
    settings: Mapping[str, Any] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
) -> Run:
    """Begins a run in a script with its own loop; every worker calls it, first of all.

    Args:
        task: a path, or a module or object that holds a task's functions.
        plan: default: data parallel over all workers.
        settings: values for the task's settings and the recipe's fields.
        run: the run folder; default: the next free ``runs/NAME``.
        resume: go on from the newest whole checkpoint in ``run``, where there is one.
        force: train even where the probes say that the plan would change the numbers; the run folder records it.

    Raises:
        PlanError: the plan needs another number of workers than were started.
        UserError: anything else that is the user's to mend.
    """
    if (loading := task_being_loaded()) is not None:
        name = loading.name
        raise TaskError(f"{name} calls stretto.start(), so it is a script with a loop of its own: `stretto run {name}`")
    imported = rss_bytes()
    if unwatched := current() is None:
        _tell_mistakes_in_one_line()
    context = attach()
    context.imports_rss_bytes = context.imports_rss_bytes or imported
    loaded = load_task(task, settings)
    chosen = plan if isinstance(plan, Plan) else Plan.parse(plan or "", None if plan else context.world_size)
    _check_started(chosen, context)
    verdict = _examined_by_one(loaded, chosen, Path(run or "runs/NAME"), context)
    group = form_group(chosen, context)
    tell = context.control.send if group.rank == 0 else _quiet
    if unwatched and group.size > 1:
        tell({"kind": "note", "text": UNWATCHED})
    law = settle(Verdict.from_json(group.broadcast_json(verdict)), force, "start(force=True)", tell)
    folder, attempt = _agree_on_folder(group, loaded, None if run is None else Path(run), resume)
    going_on = resume and bool(list_checkpoints(folder / "checkpoints"))
    checkpoint = _newest(folder, tell) if going_on else None
    before = read_resolved(folder) if going_on else None
    prepared = replace(_prepare(loaded, chosen, checkpoint), law=since(before, law))
    check_same_model(prepared.template, group)
    if group.rank == 0:
        resolved = _resolve(prepared, str(chosen), START_ORIGIN)
        if loaded.path is not None:
            if changed := changes(folder, loaded.path):
                tell({"kind": "note", "text": f"the task has changed since the last start:\n{changed}"})
            keep_sources(folder, loaded.path)
        write_resolved(folder, resolved)
        context.control.send({"kind": "resolved", "rows": _rows(resolved), "run": str(folder)})
    return open_run(prepared, RunOptions(folder, attempt), context, group)


def _examined_by_one(task: Task, plan: Plan, run: Path, context: WorkerContext) -> dict[str, Any] | None:
    """Rank 0 probes before the group is formed, as its threads and sockets have no place in a fork."""
    if context.rank:
        return None
    return examine(task, plan, lambda: build_template(task).structure, run).to_json()


def _tell_mistakes_in_one_line() -> None:
    """In a process that no launcher of ours watches: a user's mistake that nobody catches costs a line, not a trace."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            # torch.distributed wraps this hook and holds standard error back while it runs: hence the real one.
            print(f"stretto: {one_line(error)}", file=sys.__stderr__, flush=True)
            raise SystemExit(error.exit_code)
        before(kind, error, trace)

    sys.excepthook = hook


def form_group(plan: Plan, context: WorkerContext) -> Group:
    """The group of the context's epoch. Every member must call it. It breaks when the launcher says so."""
    context.coordinates = plan.mesh.describe(context.rank)
    epoch = context.epoch
    place = Rendezvous(epoch.store, epoch.number, context.rank, context.world_size)
    # The group's own limit says less than whoever looks for hangs, so it comes later.
    place = replace(place, timeout_seconds=max(place.timeout_seconds, 2 * context.hang_after))
    group = Group(place, device=_device(context))
    context.position.begin(context.coordinates, group.under_way, group.awaited)
    context.control.on_break(group.break_)
    return group


def open_run(prepared: Prepared, options: RunOptions, context: WorkerContext, group: Group) -> Run:
    """The run over a formed group. Every member must call it."""
    with group.guard():
        return Run(prepared, options, context, group)


def _prepare(task: Task, plan: Plan, checkpoint: Checkpoint | None) -> Prepared:
    template = build_template(task)
    check(template, plan)  # the optimizer is probed in the workers: a step of Adam would touch CUDA before the fork
    return Prepared(task, plan, template, checkpoint)


def _newest(run: Path, report: Report) -> Checkpoint:
    checkpoint, notes = newest_whole(run / "checkpoints")
    for note in notes:
        report({"kind": "note", "text": note})
    return checkpoint


def _quiet(event: dict[str, Any]) -> None:
    """One member tells of a note; the others keep quiet."""


def _device(context: WorkerContext) -> Any:
    """One accelerator for each worker of this host, or the CPU where there are fewer."""
    import torch

    workers_here = context.world_size if context.epoch.store.startswith("file:") else context.local_rank + 1
    if torch.cuda.is_available() and torch.cuda.device_count() >= workers_here:
        torch.cuda.set_device(context.local_rank)
        return torch.device("cuda", context.local_rank)
    return torch.device("cpu")


def _check_started(plan: Plan, context: WorkerContext) -> None:
    if plan.world_size == context.world_size:
        return
    script = Path(sys.argv[0]).name or "SCRIPT.py"
    raise PlanError(
        f"plan {plan} needs {plan.world_size} worker(s), but {context.world_size} was started; "
        f"use `stretto run {script} --workers {plan.world_size}`"
    )


def _agree_on_folder(group: Group, task: Task, wanted: Path | None, resume: bool) -> tuple[Path, int]:
    """Rank 0 makes or finds the folder and counts the starts; the others are told."""
    found: dict[str, Any] | None = None
    if group.rank == 0:
        if resume and wanted is None:
            raise LaunchError("start(resume=True) needs the run folder: start(..., run='runs/NAME', resume=True)")
        known = resume and wanted is not None and (wanted / RESOLVED_NAME).is_file()
        folder = wanted if known and wanted is not None else create_run_folder(wanted, task.name)
        starts = read_starts(folder)
        found = {"folder": str(folder), "attempt": starts[-1].attempt + 1 if starts else 1}
    found = group.broadcast_json(found)
    return Path(found["folder"]), int(found["attempt"])


def _resolve(prepared: Prepared, plan_text: str, plan_origin: str) -> Resolved:
    task, plan, cluster = prepared.task, prepared.plan, Cluster.measure()
    named = {piece.partition("=")[0].strip() for piece in plan_text.split(",")}
    recipe = {
        name: {"value": getattr(task.recipe, name), "origin": origin} for name, origin in task.recipe_origins.items()
    }
    settings = {
        name: _entry(entry) for name, entry in task.settings.items() if name not in recipe and _is_plain(entry.value)
    }
    return Resolved(
        name=task.name,
        task=None if task.path is None else str(task.path),
        settings=settings,
        recipe=recipe,
        plan={
            name: {"value": value, "origin": plan_origin if name in named else "default"}
            for name, value in asdict(plan).items()
        },
        cluster={name: {"value": value, "origin": "measured"} for name, value in asdict(cluster).items()},
        law=prepared.law,
    )


def _with_first_origins(resolved: Resolved, before: Resolved) -> Resolved:
    """A resume gives every value anew; where each came from at first is what a reader wants to know."""

    def kept(part: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        same = {key for key, entry in part.items() if key in old and old[key].get("value") == entry["value"]}
        return {key: old[key] if key in same else entry for key, entry in part.items()}

    return replace(
        resolved,
        settings=kept(resolved.settings, before.settings),
        recipe=kept(resolved.recipe, before.recipe),
    )


def _entry(setting: Setting) -> dict[str, Any]:
    value = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    return {"value": value, "origin": setting.origin}


def _is_plain(value: Any) -> bool:
    """Whether a file can hold it; a default that is an object of the task's own comes back from the task instead."""
    return value is None or type(value) in (bool, int, float, str, list, tuple, dict)


def _rows(resolved: Resolved) -> list[list[Any]]:
    parts = (
        ("settings", resolved.settings),
        ("recipe", resolved.recipe),
        ("plan", resolved.plan),
        ("cluster", resolved.cluster),
    )
    rows: list[list[Any]] = [["task", "file", resolved.task or resolved.name, "command"]]
    rows += [[section, key, entry["value"], entry["origin"]] for section, part in parts for key, entry in part.items()]
    return rows
