"""Predicted against published: how far to trust the planner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from stretto.planner.constants import Constants, find_constants
from stretto.planner.published import Published
from stretto.planner.setups import Array, Setups
from stretto.planner.step import step_time

LEAST_IN_CELL = 4  # rows, for a rank correlation and a choice to mean something
_K = TypeVar("_K", bound=Hashable)
Sets = Callable[[str, str], Constants]


@dataclass(frozen=True)
class Accuracy:
    """One source. Errors in percent; None where there is nothing to say.

    Args:
        rows: that were predicted; ``skipped``: that lack something.
        time_mape: mean absolute error of the step's time; ``time_median_ape``: the median.
        constant_mfu_mape: of predicting each row by the source's median share of the peak rate.
        rank_correlation: Spearman's, within each model and number of devices, the mean of them.
        regret_p90: by how much the measured time of the plan that would be chosen is over the best measured one, in
            nine of ten cells at most.
        memory_mape: mean absolute error of the peak memory; ``memory_median_ape``: the median.
        fit_contradictions: share of rows that fitted though predicted not to, or the other way round.
    """

    source: str
    rows: int
    skipped: int
    time_mape: float | None = None
    time_median_ape: float | None = None
    constant_mfu_mape: float | None = None
    rank_correlation: float | None = None
    regret_p90: float | None = None
    memory_mape: float | None = None
    memory_median_ape: float | None = None
    fit_contradictions: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def predict(rows: Sequence[Published], sets: Sets = find_constants) -> Array:
    """Seconds of each row's step."""
    found = np.zeros(len(rows))
    for indices in _groups(rows, lambda row: (row.model, row.machines, row.precision, row.software, row.balanced)):
        first = rows[indices[0]]
        constants = sets(first.device.name, first.software)
        setups = Setups.of([rows[at].setup for at in indices])
        time = step_time(first.model, first.machines, constants, setups, first.precision, first.balanced)
        found[indices] = time.total
    return found


def judge(rows: Iterable[tuple[str, Published | str]], sets: Sets = find_constants) -> list[Accuracy]:
    """Each source, in the order in which they come."""
    every: dict[str, list[Published | str]] = {}
    for source, row in rows:
        every.setdefault(source, []).append(row)
    return [_judge(source, found, sets) for source, found in every.items()]


def _judge(source: str, rows: list[Published | str], sets: Sets) -> Accuracy:
    timed = [row for row in rows if isinstance(row, Published) and row.seconds]
    skipped = sum(isinstance(row, str) for row in rows)
    if not timed:
        return Accuracy(source, 0, skipped)
    measured, predicted = np.array([row.seconds for row in timed], float), predict(timed, sets)
    errors = 100 * np.abs(predicted / measured - 1)
    shares = np.array([_peak_seconds(row) for row in timed]) / measured
    constant = 100 * np.abs(np.median(shares) ** -1 * shares - 1)
    correlations, regrets = _cells(timed, measured, predicted)
    return Accuracy(
        source,
        len(timed),
        skipped,
        float(errors.mean()),
        float(np.median(errors)),
        float(constant.mean()),
        float(np.mean(correlations)) if correlations else None,
        float(100 * np.quantile(regrets, 0.9)) if regrets else None,
    )


def _peak_seconds(row: Published) -> float:
    """Of a step whose every operation ran at the peak rate."""
    setup = row.setup
    tokens = setup["micro"] * setup["microbatches"] * setup["dp"] * setup["sequence"]
    rate = row.device.peak_of(row.precision) * row.machines.count
    return float(tokens * row.model.flops_per_token(setup["sequence"]) / rate)


def _cells(rows: Sequence[Published], measured: Array, predicted: Array) -> tuple[list[float], list[float]]:
    correlations, regrets = [], []
    for indices in _groups(rows, lambda row: (row.name, row.machines.count)):
        if len(indices) < LEAST_IN_CELL:
            continue
        took, said = measured[indices], predicted[indices]
        correlation = _spearman(took, said)
        correlations += [] if math.isnan(correlation) else [correlation]
        regrets.append(float(took[int(np.argmin(said))] / took.min() - 1))
    return correlations, regrets


def _groups(rows: Sequence[Published], key: Callable[[Published], _K]) -> list[list[int]]:
    found: dict[_K, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        found[key(row)].append(index)
    return list(found.values())


def _spearman(one: Array, other: Array) -> float:
    """Correlation of ranks; those of equal values are their mean."""
    first, second = _ranks(one), _ranks(other)
    if first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts).astype(float)
    found: Array = (ends - (counts - 1) / 2)[inverse]
    return found
