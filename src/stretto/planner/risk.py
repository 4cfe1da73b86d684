"""How likely it is that a step needs more memory than there is."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

# Standard deviations of the logarithm of measured over predicted. Of a rehearsed task (benchmarks/planner/here.py), and
# of a described model: 1.48 x the median of 391 runs of one system is 0.09, of others 0.01 to 0.06; and of all spreads,
# 0.1 makes those runs' coming through or not likeliest.
REHEARSED: Final = 0.03
DESCRIBED: Final = 0.1
# Of described plans that are proposed. A rehearsed plan is tried at once, and told to be too large by its first step;
# for a described one a cluster is asked for, so it has to be surer.
MOST_RISK: Final = 0.2


def probability_over(memory_bytes: float, limit: float | None, spread: float = REHEARSED) -> float:
    """That a worker needs more than it may have; the logarithm of the error is taken to be normal."""
    if limit is None:
        return 0.0
    return 0.5 * math.erfc(math.log(limit / max(1.0, memory_bytes)) / spread / math.sqrt(2))


def most_bytes(limit: float, risk: float, spread: float) -> float:
    """The most that may be predicted for a risk of at most so much. A search asks this, for one number tells of a
    million plans what the probability of each would."""
    return limit * math.exp(spread * NormalDist().inv_cdf(risk)) if risk < 1 else math.inf
