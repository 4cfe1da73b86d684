"""Predicted against published: how far to trust the planner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from stretto.planner.collectives import Links
from stretto.planner.constants import Constants, find_constants
from stretto.planner.layer import LayerModel
from stretto.planner.memory import Memory, peak_memory
from stretto.planner.published import Published
from stretto.planner.risk import DESCRIBED, MOST_RISK, probability_over
from stretto.planner.setups import Array, Flags, Setups
from stretto.planner.software import read_software
from stretto.planner.step import step_time

LIKELY = 0.5  # over it, a plan is predicted not to fit
LEAST_IN_CELL = 4  # rows, for a rank correlation and a choice to mean something
GOOD_REGRET = 0.05  # of a choice: second-best plans are mostly within that of the best
_K = TypeVar("_K", bound=Hashable)
Sets = Callable[[str, str], Constants]
_Worked = dict[Hashable, float]  # of each plan that came through, the most samples of a microbatch


@dataclass(frozen=True)
class Accuracy:
    """One source. Errors in percent; None where there is nothing to say.

    Args:
        rows: that were predicted; ``skipped``: that lack something.
        time_mape: mean absolute error of the step's time; ``time_median_ape``: the median.
        constant_mfu_mape: of predicting each row by the source's median share of the peak rate.
        rank_correlation: Spearman's of the planner's order with the measured one, within each model and number of
            devices, the mean of them. In the planner's order plans that are predicted not to fit come last.
        regret_p90: by how much the measured time of the plan that would be chosen, the fastest of those that the
            planner proposes (``MOST_RISK``), is over the best measured one, in nine of ten cells at most.
        regret_cells: share of cells in which it is over by at most ``GOOD_REGRET``.
        memory_mape: mean absolute error of the peak memory; ``memory_median_ape``: the median.
        fit_contradictions: share of runs predicted to fit, or not to, that did the other, of those that tell: all
            that came through, and those that failed for memory. Where a failure may have been a crash, it tells if
            the same plan came through with fewer samples in a microbatch and never with as many: then the plan works,
            and what more samples need is memory.
    """

    source: str
    rows: int
    skipped: int
    time_mape: float | None = None
    time_median_ape: float | None = None
    constant_mfu_mape: float | None = None
    rank_correlation: float | None = None
    regret_p90: float | None = None
    regret_cells: float | None = None
    memory_mape: float | None = None
    memory_median_ape: float | None = None
    fit_contradictions: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def predict(rows: Sequence[Published], sets: Sets = find_constants) -> Array:
    """Seconds of each row's step."""
    found = np.zeros(len(rows))
    for indices in _groups(rows, lambda row: (row.model, row.machines, row.precision, row.software, row.stages)):
        first = rows[indices[0]]
        constants = sets(first.device.name, first.software)
        setups = Setups.of([rows[at].setup for at in indices])
        time = step_time(first.model, first.machines, constants, setups, first.precision, first.stages)
        found[indices] = time.total
    return found


def predict_memory(rows: Sequence[Published], sets: Sets = find_constants) -> tuple[Array, Array]:
    """Bytes of each row's peak, of what and where the row tells it; and how likely it is that it doesn't fit."""
    told, over = np.zeros(len(rows)), np.zeros(len(rows))
    for indices in _groups(rows, _memory_key):
        row = rows[indices[0]]
        software, setups = read_software()[row.software], Setups.of([rows[at].setup for at in indices])
        links = Links(row.machines, sets(row.device.name, row.software))
        behind = LayerModel(row.model, row.machines, links, row.precision).times(setups).behind
        every: dict[bool, Memory] = {
            first: peak_memory(row.model, setups, software, row.cut, row.layer_bytes, first, behind)
            for first in (False, True)
        }
        limit = row.device.memory_bytes
        over[indices] = [probability_over(each, limit, DESCRIBED) for each in every[False].total]
        for place, at in enumerate(indices):
            told[at] = getattr(every[rows[at].memory_first], rows[at].memory_kind)[place]
    return told, over


def _memory_key(row: Published) -> Hashable:
    return row.model, row.machines, row.precision, row.software, row.cut, row.layer_bytes


def judge(rows: Iterable[tuple[str, Published | str]], sets: Sets = find_constants) -> list[Accuracy]:
    """Each source, in the order in which they come."""
    every: dict[str, list[Published | str]] = {}
    for source, row in rows:
        every.setdefault(source, []).append(row)
    worked = _worked(row for found in every.values() for row in found if isinstance(row, Published) and row.fits)
    return [_judge(source, found, sets, worked) for source, found in every.items()]


def _judge(source: str, rows: list[Published | str], sets: Sets, worked: _Worked) -> Accuracy:
    read = [row for row in rows if isinstance(row, Published)]
    found = Accuracy(source, len(read), sum(isinstance(row, str) for row in rows))
    if not read:
        return found
    told, over = predict_memory(read, sets)
    return replace(
        found,
        **_judge_time(read, over, sets),
        **_judge_memory(read, told),
        fit_contradictions=_misfits(read, over, worked),
    )


def _judge_time(rows: Sequence[Published], over: Array, sets: Sets) -> dict[str, Any]:
    places = [at for at, row in enumerate(rows) if row.seconds]
    if not places:
        return {}
    timed = [rows[at] for at in places]
    measured, predicted = np.array([row.seconds for row in timed], float), predict(timed, sets)
    errors = np.abs(predicted / measured - 1)
    shares = np.array([_peak_seconds(row) for row in timed]) / measured
    correlations, regrets = _cells(timed, measured, predicted, over[places])
    return {
        "time_mape": float(100 * errors.mean()),
        "time_median_ape": float(100 * np.median(errors)),
        "constant_mfu_mape": float(100 * np.abs(np.median(shares) ** -1 * shares - 1).mean()),
        "rank_correlation": float(np.mean(correlations)) if correlations else None,
        "regret_p90": float(100 * np.quantile(regrets, 0.9)) if regrets else None,
        "regret_cells": float(100 * np.mean(np.array(regrets) <= GOOD_REGRET)) if regrets else None,
    }


def _judge_memory(rows: Sequence[Published], told: Array) -> dict[str, Any]:
    places = [at for at, row in enumerate(rows) if row.memory_bytes]
    if not places:
        return {}
    errors = 100 * np.abs(told[places] / np.array([rows[at].memory_bytes for at in places], float) - 1)
    return {"memory_mape": float(errors.mean()), "memory_median_ape": float(np.median(errors))}


def _misfits(rows: Sequence[Published], over: Array, worked: _Worked) -> float | None:
    told = np.array(
        [row.fits or row.certain or row.setup["micro"] > worked.get(_plan_of(row), math.inf) for row in rows]
    )
    if not told.any():
        return None
    fits: Flags = np.array([row.fits for row in rows])
    return float(100 * np.mean(((over <= LIKELY) != fits)[told]))


def _plan_of(row: Published) -> Hashable:
    plan = {key: value for key, value in row.setup.items() if key not in ("micro", "microbatches")}
    return row.model, row.machines, row.software, row.precision, tuple(sorted(plan.items()))


def _worked(rows: Iterable[Published]) -> _Worked:
    found: dict[Hashable, float] = {}
    for row in rows:
        plan = _plan_of(row)
        found[plan] = max(found.get(plan, 0.0), float(row.setup["micro"]))
    return found


def _peak_seconds(row: Published) -> float:
    """Of a step whose every operation ran at the peak rate."""
    setup = row.setup
    tokens = setup["micro"] * setup["microbatches"] * setup["dp"] * setup["sequence"]
    rate = row.device.peak_of(row.precision) * row.machines.count
    return float(tokens * row.model.flops_per_token(setup["sequence"]) / rate)


def _cells(
    rows: Sequence[Published], measured: Array, predicted: Array, over: Array
) -> tuple[list[float], list[float]]:
    correlations, regrets = [], []
    for indices in _groups(rows, lambda row: (row.name, row.machines.count)):
        if len(indices) < LEAST_IN_CELL:
            continue
        took, said = measured[indices], predicted[indices]
        correlation = _spearman(took, np.where(over[indices] <= LIKELY, said, said + said.max()))
        correlations += [] if math.isnan(correlation) else [correlation]
        fits = over[indices] <= MOST_RISK
        chosen = np.argmin(np.where(fits, said, np.inf)) if fits.any() else np.argmin(over[indices])
        regrets.append(float(took[int(chosen)] / took.min() - 1))
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
