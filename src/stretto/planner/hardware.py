"""Devices and the hosts that they stand in, by their makers' figures."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import yaml

from stretto.errors import UserError, nearest

GIGA: Final = 1e9
# What makers call a GB of a device's memory, less what it keeps: 81,559 MiB are shown of an H100's 80 GB, 143,771 of an
# H200's 141.
MEMORY_GIGA: Final = 0.9956 * 2**30
# Where a rate isn't stated: that of another precision, and what share of it.
# TF32 runs at half the rate of bfloat16, 8 bits at twice.
_LIKE: Final = MappingProxyType(
    {
        "bf16": (("fp16", 1.0), ("fp32", 1.0)),
        "fp16": (("bf16", 1.0), ("fp32", 1.0)),
        "tf32": (("bf16", 0.5), ("fp32", 1.0)),
        "fp8": (("bf16", 2.0), ("fp16", 1.0), ("fp32", 1.0)),
        "fp32": (),
    }
)


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        family: of devices that run the same kernels, and reach like shares of their rates.
        peak: dense products of matrices, in flop/s, by precision.
        memory_bytes: what it has.
        memory_rate: bytes/s to and from its memory.
        link_rate: bytes/s one way to the other devices of its host.
        network_rate: bytes/s one way to other hosts, where a cluster doesn't say it: what hosts of this device have
            mostly been built with.
    """

    name: str
    family: str
    peak: dict[str, float] = field(hash=False)
    memory_bytes: float
    memory_rate: float
    link_rate: float
    network_rate: float

    def peak_of(self, precision: str) -> float:
        """Flop/s in a precision, or in the next one that it has."""
        for one, share in ((precision, 1.0), *_LIKE[precision]):
            if one in self.peak:
                return self.peak[one] * share
        raise UserError(f"device {self.name}: no rate is known in {precision}; known: {', '.join(self.peak)}")


@dataclass(frozen=True)
class Machines:
    """Equal devices in equal hosts.

    Args:
        count: devices.
        per_host: of them in a host.
        network_rate: bytes/s one way from one device to devices of other hosts, while all of its host send.
    """

    device: Device
    count: int
    per_host: int = 8
    network_rate: float = 25e9


@cache
def _known() -> dict[str, Any]:
    text = (files("stretto.planner") / "data" / "devices.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def find_device(name: str) -> Device:
    """A device by its name or one that people use for it; what stands in brackets, and its maker, is passed over.

    Raises:
        UserError: there is none of that name; the nearest is offered.
    """
    wanted = _plain(re.sub(r"\(.*?\)|\b(nvidia|tesla)\b", "", name, flags=re.IGNORECASE))
    for key, one in _known().items():
        if wanted in map(_plain, (key, *one["aliases"])):
            peak = {precision: 1e12 * rate for precision, rate in one["peak_tflops"].items()}
            rates = one["memory_gb_per_second"], one["link_gb_per_second"]
            network = GIGA * one.get("network_gb_per_second", 25)
            memory, family = MEMORY_GIGA * one["memory_gb"], one["family"]
            return Device(key, family, peak, memory, GIGA * rates[0], GIGA * rates[1], network)
    names = [alias for one in _known().values() for alias in one["aliases"]]
    raise UserError(f"no device is known as {name!r}{nearest(name, [*_known(), *names])}; known: {', '.join(_known())}")
