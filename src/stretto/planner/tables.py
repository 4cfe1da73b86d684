"""How long calls take on a cluster, from measurements by kind, members and size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Curve = Sequence[tuple[int, float]]
"""Bytes and seconds, bytes rising."""


@dataclass(frozen=True)
class LinkTable:
    """Measured calls.

    Args:
        transport: over which the members talk.
        background: calls go on while their rank works.
        curves: by kind of call (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``message``), and
            number of members.
    """

    transport: str
    background: bool
    curves: Mapping[tuple[str, int], Curve] = field(hash=False)

    def collective(self, kind: str, members: Sequence[int], num_bytes: int) -> float:
        """Seconds; of a kind that wasn't measured, those of an all-reduce."""
        count = len(members)
        if count < 2:
            return 0.0
        counts = [number for known, number in self.curves if known == kind]
        if not counts:
            return self.collective("all_reduce", members, num_bytes)
        return interpolate(self.curves[kind, min(counts, key=lambda number: (abs(number - count), number))], num_bytes)

    def message(self, num_bytes: int) -> float:
        """Seconds from one member to another."""
        return interpolate(self.curves["message", 2], num_bytes)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        curves = [
            {"kind": kind, "members": count, "bytes": [one for one, _ in curve], "seconds": [one for _, one in curve]}
            for (kind, count), curve in self.curves.items()
        ]
        return {"transport": self.transport, "background": self.background, "curves": curves}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LinkTable:
        """The reverse of :meth:`to_json`."""
        curves = {
            (one["kind"], one["members"]): tuple(zip(one["bytes"], one["seconds"], strict=True))
            for one in values["curves"]
        }
        return cls(values["transport"], values["background"], curves)


def interpolate(curve: Curve, num_bytes: int) -> float:
    """Between two sizes straight on logarithmic axes; below the least its time, above the largest its rate."""
    sizes = [size for size, _ in curve]
    at = bisect_left(sizes, num_bytes)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1] * num_bytes / curve[-1][0]
    (low, fast), (high, slow) = curve[at - 1], curve[at]
    share = math.log(num_bytes / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(fast) + share * math.log(slow))
