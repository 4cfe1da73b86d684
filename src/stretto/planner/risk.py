"""How likely it is that a step needs more memory than there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

# Standard deviation of the logarithm of measured over predicted, of a described model: 1.48 x the median of 391 runs of
# one system is 0.09, of others 0.01 to 0.06; and of all spreads, 0.1 makes those runs' coming through or not likeliest.
DESCRIBED: Final = 0.1
# Of described plans that are proposed. A rehearsed plan is tried at once, and told to be too large by its first step;
# for a described one a cluster is asked for, so it has to be surer.
MOST_RISK: Final = 0.2


@dataclass(frozen=True)
class Rehearsed:
    """How far the peak of a few steps is to be trusted.

    Args:
        factor: a heap goes on breaking up, by a share of what it holds,
        more_bytes: and by so much whatever it holds.
        spread: as of ``DESCRIBED``.
        spread_bytes: beside it, whatever the heap holds.
    """

    factor: float
    more_bytes: float
    spread: float
    spread_bytes: float

    def most(self, peak_bytes: float) -> float:
        """What many steps will take, after a rehearsal's peak."""
        return self.factor * peak_bytes + self.more_bytes

    def spread_of(self, memory_bytes: float) -> float:
        """Of so much, the standard deviation of its logarithm."""
        return math.hypot(self.spread, self.spread_bytes / max(1.0, memory_bytes))


# Of runs of 22 and 40 steps beside their rehearsals: Llamas of 250 and of 600 MB, whose batches are of one shape, and a
# T5 whose batches vary, eight plans each (benchmarks/planner/here.py --only t5). In orderly allocators only the shapes
# tell. On glibc's heap also whether the plan cuts the traced graph, of whose steps no two leave it alike.
_ORDERLY: Final = MappingProxyType({False: Rehearsed(1.0, 5e6, 0.015, 5e6), True: Rehearsed(1.03, 5e6, 0.02, 5e6)})
_HEAP: Final = MappingProxyType({False: Rehearsed(1.015, 0.0, 0.03, 0.0), True: Rehearsed(1.06, 0.0, 0.06, 0.0)})


def rehearsed(varied: bool, traced: bool, allocator: str) -> Rehearsed:
    """How far to trust a rehearsal.

    Args:
        varied: its batches differ in their shapes.
        traced: the plan cuts the traced graph.
        allocator: as :func:`stretto.observe.allocator` names it.
    """
    return _ORDERLY[varied] if allocator in ("tcmalloc", "jemalloc") else _HEAP[traced]


def probability_over(memory_bytes: float, limit: float | None, spread: float) -> float:
    """That a worker needs more than it may have; the logarithm of the error is taken to be normal."""
    if limit is None:
        return 0.0
    return 0.5 * math.erfc(math.log(limit / max(1.0, memory_bytes)) / spread / math.sqrt(2))


def most_bytes(limit: float, risk: float, spread: float) -> float:
    """The most that may be predicted for a risk of at most so much. A search asks this, for one number tells of a
    million plans what the probability of each would."""
    return limit * math.exp(spread * NormalDist().inv_cdf(risk)) if risk < 1 else math.inf
