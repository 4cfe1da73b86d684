"""Batches by default: torch's ``default_collate``, whose refusals are told by the entry that it can't take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from stretto.errors import TaskError, one_line


def collate(samples: list[Any]) -> Any:
    """One batch from a list of samples, as torch's ``default_collate`` makes it.

    Raises:
        TaskError: it can't; the line names the entry, and what keeps it from being stacked.
    """
    try:
        return default_collate(samples)
    except Exception as error:
        what = _culprit(samples, "sample") or f"default_collate says: {one_line(error)}"
        raise TaskError(
            f"task: the samples can't be made one batch: {what}; write collate(samples), which returns a batch of a "
            "list of samples, of any type"
        ) from error


def _culprit(values: Sequence[Any], path: str) -> str | None:
    """What keeps ``values``, one of each sample, from being one entry of a batch; None where nothing is known to."""
    first = values[0]
    empty = next((place for place, value in enumerate(values) if value is None), None)
    if empty is not None:
        return f"{path} is None in the {_nth(empty)} of {len(values)}"
    for family in (torch.Tensor, Mapping, (tuple, list)):
        stranger = next(
            (value for value in values if isinstance(first, family) and not isinstance(value, family)), None
        )
        if stranger is not None:
            return f"{path} is of type {type(first).__name__} here and {type(stranger).__name__} there"
    if isinstance(first, torch.Tensor):
        return _different(path, "shapes", [tuple(value.shape) for value in values])
    if isinstance(first, Mapping):
        missing = next((f"{path}[{key!r}]" for key in first for value in values if key not in value), None)
        if missing:
            return f"{missing} is not in every one"
        inside = ((f"{path}[{key!r}]", [value[key] for value in values]) for key in first)
    elif dataclasses.is_dataclass(first):
        return f"{path} is a {type(first).__name__}, a dataclass"
    elif isinstance(first, tuple | list):
        if found := _different(path, "lengths", [len(value) for value in values]):
            return found
        names = getattr(first, "_fields", None)
        inside = (
            (f"{path}.{names[place]}" if names else f"{path}[{place}]", [value[place] for value in values])
            for place in range(len(first))
        )
    elif isinstance(first, bool | int | float | str | bytes) or type(first).__module__ == "numpy":
        return None
    else:
        return f"{path} is of type {type(first).__name__}"
    return next((found for name, each in inside if (found := _culprit(each, name))), None)


def _different(path: str, what: str, found: list[Any]) -> str | None:
    other = next((each for each in found if each != found[0]), None)
    return None if other is None else f"{path} has different {what}, such as {found[0]} and {other}"


def _nth(place: int) -> str:
    return {0: "first", 1: "second", 2: "third"}.get(place, f"{place + 1}th")
