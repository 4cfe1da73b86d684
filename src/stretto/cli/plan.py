"""``stretto plan``: the plans that suit a model and a cluster best, predicted; or how well predictions have done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import JsonOption, SetOption, WorkersOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planner.accuracy import Accuracy

_COLUMNS = (
    ("rows", "rows"),
    ("skipped", "skipped"),
    ("time_mape", "time %"),
    ("time_median_ape", "median"),
    ("constant_mfu_mape", "by MFU %"),
    ("memory_mape", "memory %"),
    ("memory_median_ape", "median"),
    ("rank_correlation", "rank"),
    ("regret_p90", "regret %"),
    ("regret_cells", "in 5 %"),
    ("fit_contradictions", "misfits %"),
)


_Task = Annotated[
    str | None, typer.Argument(metavar="[TASK]", help="A task, whose plans are rehearsed on this machine.")
]
_Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="What a worker may have of it, such as 2GiB.")
]
_Check = Annotated[
    Path | None, typer.Option("--check", metavar="ROWS.jsonl", help="Judge predictions by published measurements.")
]
_Model = Annotated[Path | None, typer.Option("--model", metavar="MODEL.yaml", help="A transformer by its sizes.")]
_On = Annotated[
    str | None,
    typer.Option("--on", metavar="CLUSTER", help="128xH100, in hosts of 8; or a YAML file; of a task, doctor's."),
]
_Batch = Annotated[int | None, typer.Option("--batch", metavar="N", help="Samples of a step, of all ranks.")]
_Explain = Annotated[
    str | None, typer.Option("--explain", metavar="PLAN", help="Predict this plan alone, such as dp=16,tp=8.")
]
_Software = Annotated[
    str, typer.Option("--software", metavar="NAME", help="The training system whose constants are taken.")
]
_Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Draw the schedule, and time against memory, into an SVG file."),
]
_Price = Annotated[
    float | None, typer.Option("--price", metavar="DOLLARS", help="Of a device for an hour; of a model with --tokens.")
]
_Tokens = Annotated[
    float | None, typer.Option("--tokens", metavar="N", help="Of an epoch, for its time; and its cost, by --price.")
]
_Days = Annotated[
    float | None, typer.Option("--days", metavar="N", help="Of a run, for how much of its time failures leave.")
]
_Mtbf = Annotated[
    float, typer.Option("--mtbf-hours", metavar="HOURS", help="Between failures of one device, in the mean.")
]
_Planned = Annotated[bool, typer.Option("--planned", help="Look also at what stretto is to do and can't yet.")]


def plan_command(
    task: _Task = None,
    workers: WorkersOption = None,
    memory: _Memory = None,
    sets: SetOption = None,
    check: _Check = None,
    model: _Model = None,
    on: _On = None,
    batch: _Batch = None,
    explain: _Explain = None,
    software: _Software = "stretto",
    picture: _Picture = None,
    price: _Price = None,
    tokens: _Tokens = None,
    days: _Days = None,
    mtbf: _Mtbf = 50_000,
    planned: _Planned = False,
    json: JsonOption = False,
) -> None:
    """Predict plans' time and memory before anything is launched; or judge predictions by what was measured."""
    from stretto.errors import UserError

    _refuse_mixed(task, check, model, on, task_alone=workers is not None or memory is not None or bool(sets))
    if task is not None:
        from stretto.cli.plan_task import Asked, plan_task

        others = {"--tokens": tokens, "--days": days, "--planned": planned or None}
        if wrong := [name for name, value in others.items() if value is not None] or ["--software"] * (
            software != "stretto"
        ):
            raise UserError(f"{wrong[0]} is for --model; a TASK is rehearsed as it is")
        settings = [*(sets or ()), *([] if batch is None else [f"batch={batch}"])]
        plan_task(task, settings, workers, memory, Asked(explain, on, picture, price), json)
        return
    if check is not None:
        _check(check, json)
        return
    if model is None or on is None or batch is None:
        absent = [name for name, value in (("--model", model), ("--on", on), ("--batch", batch)) if value is None]
        said = "expected a TASK, --model MODEL.yaml --on CLUSTER --batch N, or --check ROWS.jsonl"
        missing = f"; {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing" if len(absent) < 3 else ""
        raise UserError(f"stretto plan: {said}{missing}")
    from stretto.cli.planned import Wanted, plan_described

    wanted = Wanted(explain, picture, planned, tokens, price, days, mtbf)
    plan_described(model, on, batch, software, wanted, json)


def _refuse_mixed(task: str | None, check: Path | None, model: Path | None, on: str | None, task_alone: bool) -> None:
    from stretto.errors import UserError

    if sum(one is not None for one in (task, check, model)) > 1 or (check is not None and on is not None):
        raise UserError("a TASK is rehearsed, --check judges published rows, --model describes; give one of them")
    if task is None and task_alone:
        raise UserError("--workers, --memory and --set are for a TASK, as in `stretto plan task.py --workers 2`")


def _check(rows: Path, json: bool) -> None:
    from json import dumps

    from stretto.planner.accuracy import judge
    from stretto.planner.published import read_rows

    found = judge(read_rows(rows))
    if json:
        print(dumps({"sources": [one.to_json() for one in found]}))
        return
    _print_accuracy(found)


def _print_accuracy(found: Sequence[Accuracy]) -> None:
    wide = max((len(one.source) for one in found), default=6)
    print("  ".join([f"{'source':<{wide}}", *(f"{title:>9}" for _, title in _COLUMNS)]))
    for one in found:
        values = one.to_json()
        print("  ".join([f"{one.source:<{wide}}", *(f"{_figure(values[key]):>9}" for key, _ in _COLUMNS)]))


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
