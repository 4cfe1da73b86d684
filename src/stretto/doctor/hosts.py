"""Several hosts: what is wrong on each and between them, how fast each is, and the links between all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Final

from stretto.doctor.checks import Check
from stretto.doctor.examine import matrix_mean, mean, write_cluster
from stretto.errors import LaunchError
from stretto.launch.far import Work
from stretto.launch.reach import Hosts, Place
from stretto.planner.tables import LinkTable

LOOK_SECONDS: Final = 60.0
MEET_SECONDS: Final = 3.0
MEASURE_SECONDS: Final = 300.0  # and, of each pair of hosts, PAIR_SECONDS
PAIR_SECONDS: Final = 10.0
MOST_APART: Final = 1.0  # seconds between clocks


@dataclass(frozen=True)
class FoundHost:
    """One of them.

    Args:
        found: what :func:`stretto.doctor.far.look` returned there.
        rates: means over its workers; empty where nothing could be measured.
    """

    place: Place
    workers: int
    found: Mapping[str, Any]
    rates: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        cluster = self.found["cluster"]
        return {
            "name": self.place.name,
            "address": self.place.address,
            "hostname": self.found["hostname"],
            "interface": self.found["interface"]["name"],
            "device": cluster["device"],
            "workers": self.workers,
            "cores": cluster["cores"],
            "memory_bytes": cluster["memory_bytes"],
            **self.rates,
        }


@dataclass(frozen=True)
class Examined:
    """What was found.

    Args:
        links: None where the hosts don't reach one another, so that nothing could be measured.
    """

    hosts: tuple[FoundHost, ...]
    checks: tuple[Check, ...]
    links: LinkTable | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"checks": [check.to_json() for check in self.checks], **self._measured()}

    def _measured(self) -> dict[str, Any]:
        links = None if self.links is None else self.links.to_json()
        return {"hosts": [host.to_json() for host in self.hosts], "links": links}

    def write(self, path: Path) -> None:
        """Writes the cluster file. Raises UserError where it can't be written."""
        write_cluster(path, self._measured())


def examine_hosts(hosts: Hosts, workers: int | None, folder: Path) -> Examined:
    """Looks, and measures with so many workers of each host (default: the cores of the host that has the fewest).

    Raises:
        LaunchError: a host went away, or the workers did not find one another though the hosts do.
    """
    places = hosts.places
    asked = {"first": places[0].address, "workers": workers or 0, "folder": str(folder)}
    looked = hosts.call("stretto.doctor.far:look", [asked] * len(places), LOOK_SECONDS)
    count = workers or max(1, min(found["cluster"]["cores"] for found in looked))
    own = [
        Check(f"{place.name}: {one['name']}", one["said"], one["mend"])
        for place, found in zip(places, looked, strict=True)
        for one in found["checks"]
    ]
    interfaces = [_interface(place, found["interface"], places[0]) for place, found in zip(places, looked, strict=True)]
    between = [*versions(places, looked), *_clocks(hosts), *interfaces]
    ports, met = _meet(hosts)
    between += meetings(places, met)
    rates, links = [dict[str, Any]()] * len(places), None
    if all(not one["why"] and not one["unreached"] for one in met) and all(one.passed for one in interfaces):
        rates, links = _measure(hosts, looked, count, ports[0])
    found = (FoundHost(*one) for one in zip(places, [count] * len(places), looked, rates, strict=True))
    return Examined(tuple(found), (*own, *between), links)


def versions(places: Sequence[Place], looked: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Whether all have the same."""
    for name in looked[0]["versions"]:
        by_version: dict[str, list[str]] = {}
        for place, found in zip(places, looked, strict=True):
            by_version.setdefault(found["versions"][name], []).append(place.name)
        said = "; ".join(f"{one} on {', '.join(names)}" for one, names in by_version.items())
        mend = (
            f"install the same {name} on all, or their numbers and messages may differ" if len(by_version) > 1 else ""
        )
        yield Check(f"hosts: {name}", said, mend)


def _clocks(hosts: Hosts) -> Iterator[Check]:
    """Each against this host's, the way there and back halved."""
    for place in hosts.places:
        began, ours = time.perf_counter(), time.time()
        theirs = hosts.call_one(place, "stretto.doctor.far:clock", None, LOOK_SECONDS)
        took = time.perf_counter() - began
        apart = theirs - (ours + took / 2)
        mend = "set the clocks by NTP: logs of several hosts can't be put in order" if abs(apart) > MOST_APART else ""
        yield Check(f"{place.name}: clock beside this host's", f"{apart:+.2f} s, within {took / 2:.2f}", mend)


def _interface(place: Place, found: Mapping[str, Any], first: Place) -> Check:
    name = f"{place.name}: way to {first.name}"
    if found["why"]:
        return Check(
            name, found["why"], f"give the address by which others find {first.name}: --hosts NAME=ADDRESS,..."
        )
    said = f"over {found['name']}, from {found['address']}"
    named = found["named"]
    if named and found["name"] not in named.split(","):
        mend = (
            f"GLOO_SOCKET_IFNAME={named} there, by which Gloo may wait for ever: unset it, or set it to {found['name']}"
        )
        return Check(name, said, mend)
    return Check(name, f"{said}: Gloo is told GLOO_SOCKET_IFNAME={found['name']}")


def _meet(hosts: Hosts) -> tuple[list[int], list[Any]]:
    places = hosts.places
    addresses = [place.address for place in places]
    ports = hosts.call("stretto.doctor.far:free_port", addresses, LOOK_SECONDS)
    whole = [(place.name, place.address, port) for place, port in zip(places, ports, strict=True)]
    orders = [
        {"address": address, "port": port, "others": whole[:at] + whole[at + 1 :], "seconds": MEET_SECONDS}
        for at, (_, address, port) in enumerate(whole)
    ]
    return ports, hosts.call("stretto.doctor.far:meet", orders, LOOK_SECONDS)


def meetings(places: Sequence[Place], met: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Whether each takes connections of each other."""
    for place, one in zip(places, met, strict=True):
        if one["why"]:
            mend = f"{place.address} isn't an address of that host: --hosts {place.name}=ADDRESS,..."
            yield Check(f"{place.name}: listening at {place.address}", one["why"], mend)
    listening = {place.name: one["bound"] for place, one in zip(places, met, strict=True)}
    silent = {place.name for place, one in zip(places, met, strict=True) if one["why"]}
    unreached = {place.name: found["unreached"] for place, found in zip(places, met, strict=True)}
    for source, to in permutations((place for place in places if place.name not in silent), 2):
        why = unreached[source.name].get(to.name, "")
        mend = _mend(source, to, why, listening[to.name]) if why else ""
        yield Check(f"{source.name} to {to.name}", why or "takes connections", mend)


def _mend(one: Place, other: Place, why: str, bound: str) -> str:
    if "isn't found" in why:
        return f"add {other.address} to /etc/hosts of {one.name}, or give its address: --hosts {other.name}=ADDRESS,..."
    if bound.startswith("127."):
        return (
            f"on {other.name}, {other.address} is {bound}, which others can't reach: --hosts {other.name}=ADDRESS,..."
        )
    return f"open all TCP ports from 1024 on between the hosts, in the firewall of {other.name} or on the way"


def _measure(
    hosts: Hosts, looked: Sequence[Mapping[str, Any]], workers: int, port: int
) -> tuple[list[dict[str, Any]], LinkTable]:
    places = hosts.places
    pairs = len(places) * (len(places) - 1) // 2
    orders = [
        Work(
            "stretto.doctor.far:measure",
            {"per_host": workers},
            world_size=workers * len(places),
            first_rank=workers * at,
            workers=workers,
            meeting=(places[0].address, port),
            interface=found["interface"]["name"],
        ).to_message()
        for at, found in enumerate(looked)
    ]
    told = hosts.ask(orders, MEASURE_SECONDS + PAIR_SECONDS * pairs)
    rates = [
        {
            "matrix_flops": matrix_mean(ranks),
            "memory_bytes_per_second": mean([one["memory_bytes_per_second"] for one in ranks]),
        }
        for ranks in told
    ]
    return rates, LinkTable.from_json(told[0][0]["links"])


def connect(text: str, reach: str, python: str) -> Hosts:
    """The hosts that ``--hosts`` names, reached.

    Raises:
        UserError: the text or ``reach`` means nothing.
        LaunchError: fewer than two are named, or one can't be reached.
    """
    places = Place.parse(text)
    if len(places) < 2:
        raise LaunchError(
            f"--hosts {text}: expected two or more, with commas between; of this host alone, leave it out"
        )
    return Hosts(places, reach, python)
