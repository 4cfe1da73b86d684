"""Two hosts with a link of known speed between them: network namespaces of this machine (``scripts/two_hosts.sh``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.cluster import Cluster
from stretto.doctor.hosts import examine_hosts
from stretto.launch.far import Work
from stretto.launch.reach import Hosts, Place
from stretto.planner.tables import LinkTable

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE.parents[1] / "scripts" / "two_hosts.sh")
PLACES = (Place("stretto0", "10.77.0.1"), Place("stretto1", "10.77.0.2"))
SECONDS = 600.0  # of one plan


@contextmanager
def two_hosts(rate: str) -> Iterator[Hosts]:
    """Both, reached; they are taken down again."""
    subprocess.run([SCRIPT, "up", rate], check=True, stdout=sys.stderr)
    path = ":".join([str(HERE), *filter(None, sys.path)])
    try:
        with Hosts(PLACES, f"ip netns exec {{host}} env PYTHONPATH='{path}'") as hosts:
            yield hosts
    finally:
        subprocess.run([SCRIPT, "down"], check=True)


def links_between(hosts: Hosts) -> LinkTable:
    """As ``stretto doctor --hosts`` measures them."""
    found = examine_hosts(hosts, 1, Path("runs"))
    if found.links is None:
        raise SystemExit("\n".join(f"{check.name}: {check.mend}" for check in found.checks if not check.passed))
    return found.links


def run_apart(hosts: Hosts, payload: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """What ``timed.apart`` returns for each rank, one on each host; a lone one is on the first."""
    port = hosts.call("stretto.doctor.far:free_port", [place.address for place in PLACES], SECONDS)[0]
    orders = [
        Work(
            "timed:apart",
            payload,
            world_size=world_size,
            first_rank=rank,
            workers=int(rank < world_size),
            meeting=(PLACES[0].address, port),
            interface=place.name,
            threads=Cluster.measure().threads_per_worker(world_size),
        ).to_message()
        for rank, place in enumerate(PLACES)
    ]
    return [one for ranks in hosts.ask(orders, SECONDS) for one in ranks]
