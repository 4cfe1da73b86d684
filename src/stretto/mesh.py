"""The device mesh: named axes with degrees, and where a rank stands on them. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost first; ranks are laid out row-major, so the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Ranks in the mesh."""
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: str) -> int:
        """The degree of ``axis``; 1 where the mesh has no such axis."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis. Raises ValueError for a rank outside the mesh."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size}")
        found: dict[str, int] = {}
        for axis, degree in reversed(self.axes):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis, _ in self.axes}

    def lines(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ on ``axes`` alone, in their order: one tuple for each place on the other axes."""
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.size):
            place = self.coordinates(rank)
            found.setdefault(tuple(sorted((key, at) for key, at in place.items() if key not in axes)), []).append(rank)
        return tuple(tuple(line) for line in found.values())

    def describe(self, rank: int) -> str:
        """``dp_shard=1`` and so on, for messages; axes of degree 1 are left out unless all are."""
        place = self.coordinates(rank)
        shown = {axis: place[axis] for axis, degree in self.axes if degree > 1} or place
        return ", ".join(f"{axis}={value}" for axis, value in shown.items())
