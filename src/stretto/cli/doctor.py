"""``stretto doctor``: what this machine can do, and what would make distributed jobs fail on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import JsonOption, WorkersOption

if TYPE_CHECKING:
    from stretto.doctor.examine import Host

SHOWN_BYTES = (4**5, 4**10, 4**12)


def doctor_command(
    workers: WorkersOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Keep what was measured, for `stretto plan`.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="Where runs are kept, whose disk is looked at.")
    ] = Path("runs"),
    json: JsonOption = False,
) -> int:
    """Look for what makes distributed jobs fail on this machine, and measure it for the planner."""
    from json import dumps

    from stretto.cluster import Cluster
    from stretto.doctor.examine import examine_host

    host = examine_host(workers or max(1, Cluster.measure().cores), folder)
    if out is not None:
        host.write(out)
    if json:
        print(dumps(host.to_json()))
    else:
        _print(host, out)
    return 0 if all(check.passed for check in host.checks) else 1


def _print(host: Host, out: Path | None) -> None:
    from stretto.cli.words import size

    for check in host.checks:
        print(f"{'ok  ' if check.passed else 'MEND'}  {check.name}: {check.said}")
        if check.mend:
            print(f"      {check.mend}")
    cluster = host.cluster
    print(f"\n{cluster.cores} cores, {size(cluster.memory_bytes)} of memory; {host.workers} workers at once, of each:")
    for precision, sides in host.matrix_flops.items():
        rates = ", ".join(f"{rate / 1e9:,.1f} at {side}" for side, rate in sides.items())
        print(f"  matrices in {precision}: {rates} Gflop/s")
    print(f"  memory: {host.memory_rate / 1e9:,.1f} GB/s")
    for (kind, members), curve in host.links.curves.items():
        found = dict(curve)
        times = ", ".join(f"{1e3 * found[one]:,.2f} ms for {size(one)}" for one in SHOWN_BYTES)
        print(f"  {kind} of {members} over {host.links.transport}: {times}")
    if out is not None:
        print(f"\nkept in {out}: `stretto plan TASK --on {out}`")
