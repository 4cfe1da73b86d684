"""Clusters of several kinds of hosts: which of them a model is best trained on.

The ranks of a step do equal parts of it and wait for one another, so each device counts as slow, and as small, as the
worst of those that are used, figure by figure. What is found is no more than the cluster can do: a pipeline whose
stages were cut for the devices that they are on would be faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from stretto.planner.hardware import GIGA, Machines


@dataclass(frozen=True)
class Use:
    """Some of a cluster's kinds of hosts, and the equal machines that they count as."""

    kinds: tuple[Machines, ...]
    machines: Machines

    @property
    def told(self) -> str:
        """For people."""
        return " and ".join(
            f"{one.count:,} {one.device.name} at {one.network_rate / GIGA:g} GB/s" for one in self.kinds
        )


def uses(kinds: Sequence[Machines]) -> list[Use]:
    """Every way to use some of the kinds, all of them first."""
    sizes = range(len(kinds), 0, -1)
    return [Use(some, as_the_worst(some)) for size in sizes for some in combinations(kinds, size)]


def as_the_worst(kinds: Sequence[Machines]) -> Machines:
    """As many equal devices, no better in any figure than any of the kinds; called as the one that multiplies least, by
    whose constants they are judged. They are in hosts of a size that divides each kind's."""
    first = min(kinds, key=lambda one: one.device.peak_of("bf16"))
    peak = {precision: min(one.device.peak_of(precision) for one in kinds) for precision in first.device.peak}
    device = dataclasses.replace(
        first.device,
        peak=peak,
        memory_bytes=min(one.device.memory_bytes for one in kinds),
        memory_rate=min(one.device.memory_rate for one in kinds),
        link_rate=min(one.device.link_rate for one in kinds),
    )
    per_host = math.gcd(*(one.per_host for one in kinds))
    return Machines(device, sum(one.count for one in kinds), per_host, min(one.network_rate for one in kinds))
