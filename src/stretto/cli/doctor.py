"""``stretto doctor``: what this machine can do, and what would make distributed jobs fail on it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import JsonOption, WorkersOption
from stretto.launch.reach import SSH

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stretto.doctor.checks import Check
    from stretto.doctor.examine import Host
    from stretto.doctor.hosts import Examined
    from stretto.planner.tables import LinkTable

SHOWN_BYTES = (4**5, 4**10, 4**12)


def doctor_command(
    workers: WorkersOption = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="A,B=ADDRESS",
            help="Look at several hosts, and the links between them; --workers is of each.",
        ),
    ] = None,
    reach: Annotated[
        str | None,
        typer.Option("--reach", metavar="COMMAND", help=f"How a host of --hosts is reached. [default: {SSH}]"),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="FILE", help="The Python that has stretto there. [default: as here]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Keep what was measured, for `stretto plan`.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="Where runs are kept, whose disk is looked at.")
    ] = Path("runs"),
    json: JsonOption = False,
) -> int:
    """Look for what makes distributed jobs fail on this machine, or on several, and measure it for the planner."""
    from json import dumps

    found = _here(workers, folder, (reach, python)) if hosts is None else _there(hosts, workers, folder, reach, python)
    measured = found.links is not None
    if out is not None and measured:
        found.write(out)
    if json:
        print(dumps(found.to_json()))
    else:
        _print_checks(found.checks)
        _print(found)
        if out is not None:
            kept = f"kept in {out}: `stretto plan TASK --on {out}`"
            print(f"\n{kept if measured else f'{out} was not written, as nothing could be measured'}")
    return 0 if measured and all(check.passed for check in found.checks) else 1


def _here(workers: int | None, folder: Path, others: tuple[str | None, ...]) -> Host:
    from stretto.cluster import Cluster
    from stretto.doctor.examine import examine_host

    if any(others):
        print("--reach and --python have no effect without --hosts", file=sys.stderr)
    return examine_host(workers or max(1, Cluster.measure().cores), folder)


def _there(hosts: str, workers: int | None, folder: Path, reach: str | None, python: str | None) -> Examined:
    from stretto.doctor.hosts import connect, examine_hosts

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started elsewhere is ended first
    with connect(hosts, reach or SSH, python or "") as reached:
        return examine_hosts(reached, workers, folder)


def _print_checks(checks: Iterable[Check]) -> None:
    for check in checks:
        print(f"{'ok  ' if check.passed else 'MEND'}  {check.name}: {check.said}")
        if check.mend:
            print(f"      {check.mend}")


def _print(found: Host | Examined) -> None:
    values = found.to_json()
    for host in values.get("hosts", (values,)):
        _print_rates(host)
    if found.links is not None:
        _print_links(found.links)


def _print_rates(host: Mapping[str, Any]) -> None:
    from stretto.cli.words import size

    name = f"{host['name']}: " if "name" in host else ""
    told = f"{name}{host['cores']} cores, {size(host['memory_bytes'])} of memory"
    if "matrix_flops" not in host:
        print(f"\n{told}; not measured, as the hosts don't reach one another")
        return
    print(f"\n{told}; {host['workers']} workers at once, of each:")
    for precision, sides in host["matrix_flops"].items():
        rates = ", ".join(f"{rate / 1e9:,.1f} at {side}" for side, rate in sides.items())
        print(f"  matrices in {precision}: {rates} Gflop/s")
    print(f"  memory: {host['memory_bytes_per_second'] / 1e9:,.1f} GB/s")


def _print_links(links: LinkTable) -> None:
    from stretto.cli.words import size
    from stretto.planner.tables import interpolate

    if links.per_host:
        print()
    for (kind, members, hosts), curve in links.curves.items():
        times = ", ".join(f"{1e3 * interpolate(curve, one):,.2f} ms for {size(one)}" for one in SHOWN_BYTES)
        where = f" on {hosts} hosts" if hosts > 1 else " on one host" if links.per_host else ""
        print(f"  {kind} of {members}{where} over {links.transport}: {times}")
    for pair, curve in links.pairs.items():
        rate = SHOWN_BYTES[-1] / interpolate(curve, SHOWN_BYTES[-1])
        print(f"  from host {pair[0]} to host {pair[1]}: {rate / 1e6:,.1f} MB/s")
