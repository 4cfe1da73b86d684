"""All that is looked at and measured of this host, and the file that keeps it for the planner."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from stretto.cluster import Cluster
from stretto.doctor.checks import Check, checks
from stretto.doctor.links import measure_links
from stretto.errors import UserError, one_line
from stretto.launch import LocalLauncher
from stretto.launch.job import Job, result_of
from stretto.planner.tables import LinkTable

SAME: Final = 0.1  # between the logarithms of the rates of two hosts of one kind, measured at other moments


@dataclass(frozen=True)
class Host:
    """What was found.

    Args:
        matrix_flops: flop/s of one worker while all multiply, by precision and side of the square.
        memory_rate: bytes/s of one worker while all copy.
    """

    workers: int
    cluster: Cluster
    checks: tuple[Check, ...]
    matrix_flops: dict[str, dict[str, float]]
    memory_rate: float
    links: LinkTable

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; what :func:`write_host` keeps, and the checks."""
        return {"checks": [check.to_json() for check in self.checks], **self._measured()}

    def _measured(self) -> dict[str, Any]:
        return {
            "device": self.cluster.device,
            "workers": self.workers,
            "cores": self.cluster.cores,
            "memory_bytes": self.cluster.memory_bytes,
            "matrix_flops": self.matrix_flops,
            "memory_bytes_per_second": self.memory_rate,
            "links": self.links.to_json(),
        }

    def write(self, path: Path) -> None:
        """Writes the cluster file. Raises UserError where it can't be written."""
        write_cluster(path, self._measured())


def write_cluster(path: Path, measured: Mapping[str, Any]) -> None:
    """Writes what was measured. Raises UserError where the file can't be written."""
    text = "# Measured by `stretto doctor`; `stretto plan TASK --on` reads it.\n"
    text += yaml.safe_dump(dict(measured), sort_keys=False, default_flow_style=None, width=118)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def examine_host(workers: int, folder: Path) -> Host:
    """Looks, and measures with so many workers; takes some seconds.

    Raises:
        LaunchError: the workers can't be started.
    """
    looked = tuple(checks(workers, folder))
    with LocalLauncher() as launcher:
        result = launcher.run(Job(entry="stretto.doctor.rates:work", num_workers=workers, safe_points=False))
        rates = result_of(result, f"{workers} workers could not be measured")
        links = measure_links(workers, launcher)
    memory = mean([one["memory_bytes_per_second"] for one in rates])
    return Host(workers, Cluster.measure(), looked, matrix_mean(rates), memory, links)


def matrix_mean(rates: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The workers' mean, by precision and side."""
    return {
        precision: {side: mean([one["matrix_flops"][precision][side] for one in rates]) for side in sides}
        for precision, sides in rates[0]["matrix_flops"].items()
    }


def mean(values: Sequence[float]) -> float:
    """In four figures: more mean nothing."""
    return float(f"{statistics.mean(values):.4g}")


class _Times(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bytes: list[int] = Field(min_length=1)
    seconds: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(min_length=1)

    @model_validator(mode="after")
    def as_many(self) -> _Times:
        """Of each size a time."""
        if len(self.bytes) != len(self.seconds):
            raise PydanticCustomError("pairs", "as many bytes as seconds expected")
        return self


class _Curve(_Times):
    kind: str
    members: int = Field(ge=2)
    hosts: int = Field(default=1, ge=1)


class _Pair(_Times):
    between: tuple[int, int]


class _Links(BaseModel):
    model_config = ConfigDict(extra="forbid")
    transport: str
    background: bool
    curves: list[_Curve]
    per_host: int = Field(default=0, ge=0)
    pairs: list[_Pair] = []
    burst_seconds: float = Field(default=0.0, ge=0)


class _Host(BaseModel):
    model_config = ConfigDict(extra="ignore")
    hostname: str
    workers: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    matrix_flops: dict[str, dict[str, float]]


class _Measured(BaseModel):
    """A file of one host has its workers, one of several their list."""

    model_config = ConfigDict(extra="ignore")
    workers: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    links: _Links


class _MeasuredHosts(BaseModel):
    model_config = ConfigDict(extra="ignore")
    hosts: list[_Host] = Field(min_length=2)
    links: _Links


@dataclass(frozen=True)
class Known:
    """What a file of ``stretto doctor`` tells of the hosts that a task is planned for.

    Args:
        workers: of all hosts.
        links: between them; of several hosts also how long work takes on each beside this one, if this is one of them.
        room: bytes that each worker may have on the host that has the least; None: the file tells of one host, whose
            free memory counts, or of a host that couldn't tell.
    """

    workers: int
    links: LinkTable
    room: float | None = None


def read_known(path: Path) -> Known:
    """Reads such a file.

    Raises:
        UserError: it can't be read, or isn't such a file.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise UserError(f"{path} holds nothing of a cluster; `stretto doctor -o {path.name}` writes such a file")
        if "hosts" not in values:
            one = _Measured.model_validate(values)
            return Known(one.workers, LinkTable.from_json(one.links.model_dump()))
        found = _MeasuredHosts.model_validate(values)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = f"{path} is no YAML: {one_line(error)}"
        raise UserError(f"{told}; `stretto doctor -o {path.name}` writes it anew") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        said = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise UserError(f"{path}: {place}: {said}; `stretto doctor -o {path.name}` writes such a file") from error
    table = LinkTable.from_json(found.links.model_dump())
    paces = _paces(found.hosts, socket.gethostname())
    note = "" if paces else f"this host is none of those in {path}: their work is taken to last as long as here"
    room = min(host.memory_bytes / host.workers for host in found.hosts) or None
    return Known(sum(host.workers for host in found.hosts), replace(table, paces=paces, note=note), room)


def _paces(hosts: Sequence[_Host], here: str) -> tuple[float, ...]:
    """How long each works for a second of this host, by the rates at which they multiply; empty where it is none of
    them."""
    mine = next((host.matrix_flops["fp32"] for host in hosts if host.hostname == here), None)
    if mine is None:
        return ()
    found = []
    for host in hosts:
        pace = statistics.geometric_mean([rate / host.matrix_flops["fp32"][side] for side, rate in mine.items()])
        found.append(1.0 if host.hostname == here or abs(math.log(pace)) < SAME else pace)
    return tuple(found)
