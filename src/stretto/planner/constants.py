"""What can't be counted: how far a training system on one type of device falls short of the device.

Eight numbers a set, each with a meaning and a unit. ``data/constants.yaml`` holds the sets, which
``benchmarks/planner/fit.py`` has fitted to published measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import yaml

from stretto.errors import UserError, nearest
from stretto.planner.hardware import Device, find_device

# By which power of its rates the shares fall that programs reach of a device: the faster it computes and reads, the
# less a product, a kernel, a tile is for it. V100, A100 and H100 have 0.87, 0.76 and 0.62 of their peaks in large
# products.
FALL: Final = 0.25

MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "matmul": "share of the peak rate that a large product of matrices has",
        "attention": "share of the peak rate that the products inside attention have",
        "memory": "share of the memory rate that element-by-element operations have",
        "launch_seconds": "seconds that a host needs to launch one layer's forward; backward takes twice as long",
        "stall_seconds": "seconds by which each rank of tp holds up a layer where messages leave the host",
        "inside": "share of the rate of links inside a host that collectives have",
        "between": "share of the rate of links between hosts that collectives have",
        "latency_seconds": "seconds of a collective of nothing between two ranks",
    }
)


@dataclass(frozen=True)
class Constants:
    """One set; see ``MEANINGS``."""

    matmul: float = 0.7
    attention: float = 0.4
    memory: float = 0.7
    launch_seconds: float = 1e-3
    stall_seconds: float = 0.0
    inside: float = 0.65
    between: float = 0.5
    latency_seconds: float = 2e-5

    def __post_init__(self) -> None:
        """Raises ValueError for a number that means nothing."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (value == 0 and field.name != "stall_seconds"):
                raise ValueError(f"{field.name} must be over 0, got {value}")

    def to_json(self) -> dict[str, float]:
        """As a JSON object."""
        return asdict(self)


@cache
def read_sets() -> dict[str, Constants]:
    """All sets by name, ``DEVICE/SOFTWARE``."""
    text = (files("stretto.planner") / "data" / "constants.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text) or {}
    return {name: Constants(**values) for name, values in found.items()}


def find_constants(device: str, software: str) -> Constants:
    """The set of a training system on a device; where there is none, what is likely."""
    return likely(device, software, read_sets())


def likely(device: str, software: str, sets: Mapping[str, Constants]) -> Constants:
    """What to expect of a training system on a device: its own set; else the median of those of that system on devices
    of the same family; else of all. Shares are first scaled to the device, see ``FALL``.
    """
    own, family = sets.get(f"{device}/{software}"), find_device(device).family
    if own or not sets:
        return own or Constants()
    same = [name for name in sets if _system(name) == software and _device(name).family == family]
    found = [_scaled(sets[name], _device(name), find_device(device)) for name in same or sets]
    return Constants(**{field.name: median(one[field.name] for one in found) for field in fields(Constants)})


def _scaled(one: Constants, seen: Device, wanted: Device) -> dict[str, float]:
    rates = (wanted.peak_of("bf16") / seen.peak_of("bf16")) ** -FALL, (wanted.memory_rate / seen.memory_rate) ** -FALL
    by = {"matmul": rates[0], "attention": rates[0], "memory": rates[1]}
    return {name: min(1.0, value * by[name]) if name in by else value for name, value in asdict(one).items()}


def _device(name: str) -> Device:
    return find_device(name.partition("/")[0])


def _system(name: str) -> str:
    return name.partition("/")[2]


def check_software(name: str) -> str:
    """Raises UserError for a training system that there are no constants of."""
    known = sorted(set(map(_system, read_sets())))
    if name not in known:
        raise UserError(f"there are no constants of {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
    return name
