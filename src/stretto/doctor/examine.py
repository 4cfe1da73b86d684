"""All that is looked at and measured of this host, and the file that keeps it for the planner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.cluster import Cluster
from stretto.doctor.checks import Check, checks
from stretto.doctor.links import measure_links
from stretto.errors import LaunchError, UserError
from stretto.launch import LocalLauncher
from stretto.launch.job import Job
from stretto.planner.tables import LinkTable


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
        text = "# Measured by `stretto doctor`; `stretto plan TASK --on` reads it.\n"
        text += yaml.safe_dump(self._measured(), sort_keys=False, default_flow_style=None, width=118)
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
        result = launcher.run(Job(entry="stretto.doctor.rates:work", num_workers=workers))
        rates = [found for found in result.results.values() if found is not None]
        if len(rates) < workers:
            raise LaunchError(f"{workers} workers could not be measured: {result.failure}")
        links = measure_links(workers, launcher)
    matrix = {
        precision: {side: _mean([one["matrix_flops"][precision][side] for one in rates]) for side in sides}
        for precision, sides in rates[0]["matrix_flops"].items()
    }
    memory = _mean([one["memory_bytes_per_second"] for one in rates])
    return Host(workers, Cluster.measure(), looked, matrix, memory, links)


def _mean(values: Sequence[float]) -> float:
    """In four figures: more mean nothing."""
    return float(f"{statistics.mean(values):.4g}")


class _Curve(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str
    members: int = Field(ge=2)
    bytes: list[int] = Field(min_length=1)
    seconds: list[float] = Field(min_length=1)


class _Links(BaseModel):
    model_config = ConfigDict(extra="forbid")
    transport: str
    background: bool
    curves: list[_Curve]


class _Measured(BaseModel):
    model_config = ConfigDict(extra="ignore")
    workers: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    links: _Links


def read_links(path: Path) -> tuple[int, LinkTable]:
    """Workers and links of a file that ``stretto doctor`` wrote.

    Raises:
        UserError: it can't be read, or isn't such a file.
    """
    try:
        found = _Measured.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        said = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise UserError(f"{path}: {place}: {said}; `stretto doctor -o {path.name}` writes such a file") from error
    return found.workers, LinkTable.from_json(found.links.model_dump())
