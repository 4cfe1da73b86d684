"""``stretto explain``: what a plan makes of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from stretto.cli.options import JsonOption, SetOption, TaskArgument, find_task, parse_sets


def explain_command(
    task: TaskArgument,
    plan: Annotated[str, typer.Option("--plan", metavar="PLAN", help="A plan that cuts layers, such as tp=2.")],
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Say which layers a plan cuts, and why it leaves the others whole; nothing is trained."""
    from json import dumps

    from stretto.explain import explain_layers
    from stretto.plan import Plan
    from stretto.task import load_task

    parsed = Plan.parse(plan)
    rows = explain_layers(load_task(find_task(task), parse_sets(sets)), parsed)
    if json:
        print(dumps({"plan": str(parsed), "parameters": [row.to_json() for row in rows]}))
        return
    names, shapes = [row.name for row in rows], ["x".join(map(str, row.shape)) or "1" for row in rows]
    wide, long = max(map(len, ["parameter", *names])), max(map(len, ["shape", *shapes]))
    print(f"{'parameter':<{wide}}  {'shape':<{long}}  a rank has  how, or why not")
    for row, shape in zip(rows, shapes, strict=True):
        print(f"{row.name:<{wide}}  {shape:<{long}}  {row.share:>10.0%}  {row.why}")
    total, held = sum(row.numel for row in rows), sum(row.numel * row.share for row in rows)
    print(f"\nplan {parsed}: a rank has {held / max(1, total):.0%} of {total:,} elements")
