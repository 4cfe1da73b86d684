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
        drift: by how much it is less than that of many steps: a heap goes on breaking up.
        spread: as of ``DESCRIBED``.
    """

    drift: float
    spread: float


# Of runs of 40 steps beside their rehearsals: T5, whose batches vary in shape, and Llama, whose don't, eight plans each
# (benchmarks/planner/here.py --only t5). In orderly allocators only the shapes tell. On glibc's heap also whether the
# plan cuts the traced graph, of whose steps no two leave it alike.
_ORDERLY: Final = MappingProxyType({False: Rehearsed(1.025, 0.025), True: Rehearsed(1.045, 0.025)})
_HEAP: Final = MappingProxyType({False: Rehearsed(1.015, 0.03), True: Rehearsed(1.06, 0.06)})


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
