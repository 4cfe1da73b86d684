"""``stretto plan``: the plans that suit a model and a cluster best, predicted; or how well predictions have done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import JsonOption

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


def plan_command(
    check: Annotated[
        Path | None, typer.Option("--check", metavar="ROWS.jsonl", help="Judge predictions by published measurements.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict plans' time and memory before anything is launched; or judge predictions by what was measured."""
    from json import dumps

    from stretto.errors import UserError
    from stretto.planner.accuracy import judge
    from stretto.planner.published import read_rows

    if check is None:
        raise UserError("stretto plan: expected --check ROWS.jsonl")
    found = judge(read_rows(check))
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
