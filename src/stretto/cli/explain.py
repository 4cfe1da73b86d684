"""``stretto explain``: what a plan makes of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import JsonOption, SetOption, TaskArgument, find_task, parse_sets, write_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.explain import Explained, Row
    from stretto.schedule import Timeline


def explain_command(
    task: TaskArgument,
    plan: Annotated[str, typer.Option("--plan", metavar="PLAN", help="A plan, such as dp=2,tp=2,pp=2,microbatches=8.")],
    sets: SetOption = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the pipeline's schedule into an SVG file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what a plan makes of a model: stages, layers that are cut, and what does nothing; nothing is trained."""
    from json import dumps

    from stretto.errors import UserError
    from stretto.explain import explain
    from stretto.plan import Plan
    from stretto.schedule import picture as drawn
    from stretto.task import load_task

    parsed = Plan.parse(plan)
    if picture is not None and parsed.line == 1:
        raise UserError(f"--picture draws the schedule of a pipeline, and plan {parsed} has none; give it pp or branch")
    found = explain(load_task(find_task(task), parse_sets(sets)), parsed)
    if picture is not None and found.timeline is not None:
        write_picture(picture, drawn(found.timeline, f"plan {parsed}"))
    if json:
        print(dumps(found.to_json()))
        return
    _print(found)


def _print(found: Explained) -> None:
    print(f"plan {found.plan}")
    for feature in found.features:
        print(f"  {feature.key:<22}  {'active' if feature.active else 'INACTIVE'}: {feature.said}")
    if found.timeline is not None:
        _print_stages(found, found.timeline)
    for note in found.notes:
        print(f"note: {note}")
    _print_parameters(found.parameters, bool(found.stages))


def _print_stages(found: Explained, step: Timeline) -> None:
    places = [found.place(row) for row in found.stages]
    wide = max(map(len, places))
    print(f"\nstage  {'rank':<{wide}}     elements    forward   backward  from ... to; sends")
    for row, place in zip(found.stages, places, strict=True):
        sends = ", ".join(f"{size:,} bytes to {to}" for to, size in row.sends.items())
        times = f"{1e3 * row.forward_seconds:>7.2f} ms {1e3 * row.backward_seconds:>7.2f} ms"
        where = f"{row.first} ... {row.last}" + (f"; {sends}" if sends else "")
        print(f"{row.stage:>5}  {place:<{wide}}  {row.elements:>11,}  {times}  {where}")
    took = f"{1e3 * step.seconds:.1f} ms"
    print(f"a step's microbatches take {took} by arithmetic, and ranks wait for {step.bubble:.0%} of it")


def _print_parameters(rows: Sequence[Row], stages: bool) -> None:
    names = [row.name for row in rows]
    shapes = ["x".join(map(str, row.shape)) or "1" for row in rows]
    wide, long = max(map(len, ["parameter", *names])), max(map(len, ["shape", *shapes]))
    print(f"\n{'parameter':<{wide}}  {'shape':<{long}}  {'stage  ' * stages}a rank has  how, or why not")
    for row, shape in zip(rows, shapes, strict=True):
        at = f"{'+'.join(map(str, row.stages)):>5}  " if stages else ""
        print(f"{row.name:<{wide}}  {shape:<{long}}  {at}{row.share:>10.0%}  {row.why}")
    total, held = sum(row.numel for row in rows), sum(row.numel * row.share for row in rows)
    print(f"\nof {total:,} elements tp leaves {held / max(1, total):.0%} on a rank")
