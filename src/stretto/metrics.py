"""What an evaluation adds up: pairs (sum, weight), and rows that are kept sample by sample.

A pair is added up over any cut of a split, and divided once, at the end. What no sum can hold (AUC, ranking measures,
quantiles) needs every sample: a metric of one tensor [samples, ...] is kept row by row. :meth:`Task.summarize` makes
numbers of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor

    Metric = tuple[Tensor, Tensor] | Tensor
    Total = tuple[float | Tensor, float | Tensor] | Tensor


def check_metrics(found: Any) -> dict[str, Metric]:
    """What ``metrics()`` returned for one batch: by name a pair of tensors of any shape, or rows [samples, ...].

    Raises:
        TaskError: no mapping, the name ``loss``, a bare scalar, or what is neither a pair nor a tensor.
    """
    if not isinstance(found, Mapping):
        raise TaskError(f"task: metrics() must return a dict of metrics by name, got {type(found).__name__}")
    if "loss" in found:
        raise TaskError("task: metrics() returned 'loss', which is what loss() adds up to; give it another name")
    return {str(name): _check(value, f"metrics()[{name!r}]") for name, value in found.items()}


def ratios(totals: Mapping[str, Total]) -> dict[str, float]:
    """Sum over weight of every pair of two numbers. Raises TaskError for anything that is more than that."""
    return {name: ratio(total, name) for name, total in totals.items()}


def ratio(total: Total, name: str) -> float:
    """Sum over weight, NaN where nothing has weight. Raises TaskError for rows, and for sums that have axes."""
    if isinstance(total, tuple) and not any(hasattr(part, "shape") for part in total):
        above, below = (float(part) for part in total)
        return above / below if below else float("nan")
    raise TaskError(
        f"task: metrics()[{name!r}] is more than a pair of two numbers; write summarize(totals), which gets the totals "
        "by name and returns the numbers to show"
    )


def numbers(found: Any) -> dict[str, float]:
    """What ``summarize()`` returned, as plain numbers. Raises TaskError naming what is none."""
    if not isinstance(found, Mapping):
        raise TaskError(f"task: summarize() must return a dict of numbers by name, got {type(found).__name__}")
    plain = {}
    for name, value in found.items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise TaskError(f"task: summarize()[{name!r}] must be one number, got {kind}") from error
    return plain


def _check(value: Any, where: str) -> Metric:
    import numpy
    import torch

    if isinstance(value, torch.Tensor | numpy.ndarray):
        rows = torch.as_tensor(value)
        if rows.ndim:
            return rows
        raise TaskError(
            f"task: {where} returned one number; return the pair (sum, weight), as in `right.sum(), "
            "torch.tensor(len(right))`, as a mean of means over uneven pieces is not the mean; or one row for each "
            "sample, which summarize(totals) gets for the whole split"
        )
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TaskError(
            f"task: {where} must be the pair (sum, weight) or a tensor of one row for each sample, "
            f"got {type(value).__name__}"
        )
    total, weight = (torch.as_tensor(part) for part in value)
    return total, weight
