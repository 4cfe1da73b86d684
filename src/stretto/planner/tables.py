"""How long calls take on a cluster, from measurements by kind, members, hosts and size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Curve = Sequence[tuple[int, float]]
"""Bytes and seconds, bytes rising."""


@dataclass(frozen=True)
class LinkTable:
    """Measured calls. Consecutive ranks fill a host before the next one.

    Args:
        transport: over which the members talk.
        background: calls go on while their rank works.
        curves: by kind of call (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``message``), number
            of members, and number of hosts that they are on.
        per_host: ranks of one host; 0: all are on one.
        pairs: messages between two hosts, by their places, the lower first.
        paces: of each host, how long a rank works there that works a second here; empty: as long.
        note: what a person should know of that.
        burst_seconds: by how much a call between hosts is quicker, at most, after a rest: a link that is held to a rate
            lets so much pass at once as it has saved up meanwhile, up to a bound.
    """

    transport: str
    background: bool
    curves: Mapping[tuple[str, int, int], Curve] = field(hash=False)
    per_host: int = 0
    pairs: Mapping[tuple[int, int], Curve] = field(default_factory=dict, hash=False)
    paces: tuple[float, ...] = ()
    note: str = ""
    burst_seconds: float = 0.0

    def collective(self, kind: str, members: Sequence[int], num_bytes: int, rested: float = 0.0) -> float:
        """Seconds; of a kind that wasn't measured, those of an all-reduce. What was measured is what the slowest link
        takes: members who don't use that are quicker in proportion to messages over theirs.

        Args:
            rested: seconds in which they had sent nothing.
        """
        count = len(members)
        if count < 2:
            return 0.0
        known = [(number, hosts) for one, number, hosts in self.curves if one == kind]
        if not known:
            return self.collective("all_reduce", members, num_bytes, rested)
        on = sorted({self._host(rank) for rank in members})

        def far(one: tuple[int, int]) -> tuple[Any, ...]:
            number, hosts = one
            return (hosts > 1) != (len(on) > 1), abs(number - count), abs(hosts - len(on)), one

        curve = self.curves[kind, *min(known, key=far)]
        seconds = interpolate(curve, num_bytes) if len(on) == 1 else self._after_rest(curve, num_bytes, rested)
        mine = [self.pairs[pair] for pair in combinations(on, 2) if pair in self.pairs]
        if not mine:
            return seconds
        slowest, slow = (max(interpolate(one, num_bytes) for one in pairs) for pairs in (self.pairs.values(), mine))
        return seconds * slow / slowest

    def _after_rest(self, curve: Curve, num_bytes: int, rested: float) -> float:
        whole = interpolate(curve, num_bytes)
        return max(min(whole, curve[0][1]), whole - min(rested, self.burst_seconds))

    def message(self, source: int, to: int, num_bytes: int, rested: float = 0.0) -> float:
        """Seconds from one rank to another; ``rested``: seconds in which the one had sent the other nothing."""
        one, other = sorted((self._host(source), self._host(to)))
        if (curve := self.pairs.get((one, other))) is None:
            curve = self.curves.get(("message", 2, 1 if one == other else 2)) or self._any_message()
        return interpolate(curve, num_bytes) if one == other else self._after_rest(curve, num_bytes, rested)

    def pace(self, rank: int) -> float:
        """How long the rank works for what takes a second here."""
        host = self._host(rank)
        return self.paces[host] if host < len(self.paces) else 1.0

    def _host(self, rank: int) -> int:
        return rank // self.per_host if self.per_host else 0

    def _any_message(self) -> Curve:
        """Where hosts of one worker each were measured, or one host alone: what there is."""
        return next(curve for (kind, *_), curve in self.curves.items() if kind == "message")

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        curves = [
            {"kind": kind, "members": count, "hosts": hosts, **_columns(curve)}
            for (kind, count, hosts), curve in self.curves.items()
        ]
        pairs = [{"between": list(pair), **_columns(curve)} for pair, curve in self.pairs.items()]
        found: dict[str, Any] = {"transport": self.transport, "background": self.background, "curves": curves}
        if self.paces:
            found["paces"] = list(self.paces)
        several = {"per_host": self.per_host, "pairs": pairs, "burst_seconds": self.burst_seconds}
        return {**found, **several} if self.per_host else found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LinkTable:
        """The reverse of :meth:`to_json`; files of one host from before there were several are read as well."""
        curves = {(one["kind"], one["members"], one.get("hosts", 1)): _rows(one) for one in values["curves"]}
        pairs = {(one["between"][0], one["between"][1]): _rows(one) for one in values.get("pairs", ())}
        return cls(
            values["transport"],
            values["background"],
            curves,
            values.get("per_host", 0),
            pairs,
            tuple(values.get("paces", ())),
            burst_seconds=values.get("burst_seconds", 0.0),
        )


def _columns(curve: Curve) -> dict[str, Any]:
    return {"bytes": [one for one, _ in curve], "seconds": [one for _, one in curve]}


def _rows(one: Mapping[str, Any]) -> Curve:
    return tuple(zip(one["bytes"], one["seconds"], strict=True))


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
