"""Files that people write for the planner: a model that is only described, and a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stretto.errors import UserError, nearest, one_line
from stretto.planner.hardware import GIGA, Device, Machines, find_device
from stretto.planner.transformer import Transformer

PER_HOST = 8  # devices of a host, where nothing is said
_T = TypeVar("_T", bound=BaseModel)


@dataclass(frozen=True)
class Described:
    """A model, with what a batch of it is made of.

    Args:
        sequence: tokens of a sample.
        precision: of the products of matrices.
    """

    model: Transformer
    sequence: int
    precision: str = "bf16"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Model(_File):
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(None, ge=1)
    ffn: int | None = Field(None, ge=1)
    vocab: int = Field(ge=1)
    sequence: int = Field(ge=1)
    gated: bool = False
    tied: bool = True
    positions: int = Field(0, ge=0)
    precision: Literal["bf16", "fp16", "fp8", "tf32", "fp32"] = "bf16"

    @model_validator(mode="after")
    def _divides(self) -> _Model:
        for name, value, by, count in (
            ("hidden", self.hidden, "heads", self.heads),
            ("heads", self.heads, "kv_heads", self.kv_heads or 1),
        ):
            if value % count:
                raise ValueError(f"{name} must be a multiple of {by}, got {name}={value} and {by}={count}")
        return self


class _Hosts(_File):
    device: str
    count: int = Field(ge=1)
    devices: int = Field(PER_HOST, ge=1)
    network_gb_per_second: float = Field(25.0, gt=0)


class _Cluster(_File):
    hosts: list[_Hosts] = Field(min_length=1)


def read_model(path: Path) -> Described:
    """A model from a YAML file of sizes: ``layers``, ``hidden``, ``heads``, ``vocab`` and ``sequence``; and, where they
    differ from what is usual, ``kv_heads`` (heads), ``ffn`` (4 hidden), ``gated`` (false), ``tied`` (true),
    ``positions`` (0: none that are learned) and ``precision`` (bf16).

    Raises:
        UserError: the file can't be read, or a value isn't what it must be; in one line.
    """
    found = _read(_Model, path)
    kv_heads, ffn = found.kv_heads or found.heads, found.ffn or 4 * found.hidden
    model = Transformer(
        found.layers, found.hidden, found.heads, kv_heads, ffn, found.vocab, found.gated, found.tied, found.positions
    )
    return Described(model, found.sequence, found.precision)


def read_cluster(text: str) -> tuple[Machines, ...]:
    """``128xH100``, in hosts of 8; or a YAML file, whose rate is that of one device to other hosts, one way::

        hosts:
          - device: H100
            count: 16                    # hosts
            devices: 8                   # in each; 8 if left out
            network_gb_per_second: 50    # 25 if left out

    Returns:
        Of each kind of hosts its devices.

    Raises:
        UserError: neither, or a device that isn't known.
    """
    if found := re.fullmatch(r"(\d+)\s*[x*]\s*(.+)", text):
        count = int(found[1])
        if count < 1:
            raise UserError(f"--on {text}: expected at least one device, as in 8xH100")
        return (_whole(Machines(find_device(found[2]), count, min(count, PER_HOST)), text),)
    if not text.endswith((".yaml", ".yml")):
        raise UserError(f"--on {text}: expected COUNTxDEVICE, as in 128xH100, or a cluster's YAML file")
    hosts = _read(_Cluster, Path(text)).hosts
    counts: dict[tuple[Device, int, float], int] = {}
    for one in hosts:
        kind = find_device(one.device), one.devices, GIGA * one.network_gb_per_second
        counts[kind] = counts.get(kind, 0) + one.count * one.devices
    return tuple(Machines(device, count, devices, rate) for (device, devices, rate), count in counts.items())


def _whole(machines: Machines, text: str) -> Machines:
    if machines.count % machines.per_host:
        near = machines.count // machines.per_host * machines.per_host
        said = f"--on {text}: expected whole hosts of {machines.per_host}, got {machines.count} devices"
        raise UserError(f"{said}; use {near} or {near + machines.per_host}, or say in a YAML file how hosts are")
    return machines


def _read(kind: type[_T], path: Path) -> _T:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected keys with values ({', '.join(kind.model_fields)}), got {str(found)[:40]!r}")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise UserError(f"{path}: {_told(error, kind)}") from error


def _told(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first mistake: what was expected, what was found, the nearest valid name."""
    first = error.errors()[0]
    place, got = ".".join(map(str, first["loc"])), first["input"]
    if first["type"] == "extra_forbidden":
        # Which file's part a key stands in is known by how deep it is.
        valid = [*(kind if len(first["loc"]) == 1 else _Hosts).model_fields]
        return f"unknown key {place!r}{nearest(str(first['loc'][-1]), valid)}; valid: {', '.join(valid)}"
    if first["type"] == "missing":
        return f"{place} is missing; give it, as in {first['loc'][-1]}: 8"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    near = nearest(str(got), _words(first)) if first["type"] == "literal_error" else ""
    return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {got!r}{near}"


def _words(first: Any) -> list[str]:
    return re.findall(r"'(\w+)'", str(first["ctx"]["expected"]))
