"""``stretto export``: the weights of a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import JsonOption, RunArgument


def export_command(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to; else RUN/model.safetensors.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="Of the checkpoint of this step; else the newest.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the weights of a run into one safetensors file, under the model's own names."""
    import sys
    from json import dumps

    from stretto.cli.words import size
    from stretto.runfolder import read_resolved
    from stretto.weights import export_weights, find_checkpoint

    read_resolved(run)  # or it is no run folder, which is said with the nearest name
    checkpoint, notes = find_checkpoint(run, step)
    for note in notes:
        print(f"note: {note}", file=sys.stderr if json else sys.stdout)
    folder = run if out is None else out
    found = export_weights(checkpoint, folder / "model.safetensors" if folder.is_dir() else folder)
    if json:
        told = {"path": str(found.path), "step": found.step, "tensors": found.num_tensors, "bytes": found.num_bytes}
        print(dumps({**told, "aliases": found.aliases}))
        return
    print(f"{found.path}: {found.num_tensors} tensors of step {found.step:,}, {size(found.num_bytes)}")
    for alias, name in found.aliases.items():
        print(f"{alias} is {name}, and written once: stretto.load_weights(model, {str(found.path)!r}) knows")
