"""What is asked of each of several hosts; called there."""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from stretto.cluster import Cluster
from stretto.doctor.checks import checks
from stretto.errors import LaunchError, one_line
from stretto.launch import WorkerContext
from stretto.launch.interface import interface_to, named_interface

_AGAIN_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 1.0


def look(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What is here: versions, devices, and the interface towards ``first``, an address."""
    try:
        (interface, own), why = interface_to(payload["first"]), ""
    except LaunchError as error:
        interface, own, why = "", "", one_line(error)
    cluster = Cluster.measure()
    return {
        "hostname": socket.gethostname(),
        "versions": {"stretto": _version("stretto"), "torch": _version("torch"), "Python": platform.python_version()},
        "cluster": asdict(cluster),
        "interface": {"name": interface, "address": own, "why": why, "named": named_interface()},
        "checks": [one.to_json() for one in checks(payload["workers"] or cluster.cores, Path(payload["folder"]))],
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def clock(payload: None) -> float:
    """What time it is here."""
    return time.time()


def free_port(address: str) -> int:
    """One that can be listened at now; 0 where the address isn't this host's."""
    try:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return 0


def meet(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Listens at ``address`` and ``port``, and connects to each of ``others``, until all have come or time is up.

    Returns:
        ``bound``: the address listened at, ``why`` not, and of ``unreached`` others why.
    """
    until = time.monotonic() + payload["seconds"]
    try:
        server = socket.create_server((payload["address"], payload["port"]))
    except OSError as error:
        why = error.strerror or str(error)
        return {"bound": "", "why": why, "unreached": {}}
    with server:
        unreached: dict[str, str] = {}
        trying = [
            threading.Thread(target=_reach, args=(*other, until, unreached), daemon=True) for other in payload["others"]
        ]
        for one in trying:
            one.start()
        come = 0
        while come < len(payload["others"]) and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                server.accept()[0].close()
                come += 1
            except TimeoutError:
                break
        for one in trying:
            one.join(2 * _CONNECT_SECONDS + max(0.0, until - time.monotonic()))
        return {"bound": server.getsockname()[0], "why": "", "unreached": unreached}


def _reach(name: str, address: str, port: int, until: float, unreached: dict[str, str]) -> None:
    """Tries until then: the other may not listen yet."""
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return
        except socket.gaierror as error:
            unreached[name] = f"the name {address} isn't found ({error.strerror})"
            return
        except OSError as error:
            if time.monotonic() > until:
                unreached[name] = f"{address} doesn't take connections ({error.strerror or error})"
                return
        time.sleep(_AGAIN_SECONDS)


def measure(payload: Mapping[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A worker's entry: this one's rates, with all at it, then the links between all. Rank 0's links count."""
    from stretto.comm.group import Group, Rendezvous
    from stretto.doctor import links, rates

    epoch = context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    group.barrier()
    found = rates.work({}, context)
    group.barrier()
    found["links"] = links.table(group, payload["per_host"]).to_json()
    group.close()
    return found
