"""Trees of anything: their tensors by path, and whether two samples are the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is no container; dataclasses, mappings, tuples and lists are entered."""
    if isinstance(tree, Mapping):
        children = [(f"[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None)
        children = [(f".{names[i]}" if names else f"[{i}]", value) for i, value in enumerate(tree)]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    else:
        yield path, tree
        return
    for name, value in children:
        yield from leaves(value, path + name)


def tensors(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by path."""
    return {path: value for path, value in leaves(tree) if isinstance(value, Tensor)}


def difference(one: Tensor, other: Tensor) -> float:
    """The largest |a - b| over the largest magnitude; 0 where equal, infinity where only one of two is a number.

    Magnitudes under 1e-6 count as 1e-6: what is rounding noise in place of an exact zero must not count as a change.
    """
    if one.shape != other.shape or one.layout != other.layout:
        return math.inf
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else 1.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one - other).abs())
    if not apart.numel():
        return 0.0
    if not apart.isfinite().all():
        return math.inf
    finite = one.abs()[one.isfinite()]
    return float(apart.max()) / max(1e-6, float(finite.max()) if finite.numel() else 0.0)


def first_difference(one: Any, other: Any) -> str | None:
    """The path of the first value that differs between two samples; "" for the sample itself; None where all is equal.

    What has no known meaning (an image object, a file) is passed over.
    """
    here, there = list(leaves(one)), list(leaves(other))
    if [path for path, _ in here] != [path for path, _ in there]:
        return ""
    return next((path for (path, a), (_, b) in zip(here, there, strict=True) if not _same(a, b)), None)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and difference(one, other) == 0
    if isinstance(one, numpy.ndarray | numpy.generic) and isinstance(other, numpy.ndarray | numpy.generic):
        return _same_arrays(numpy.asarray(one), numpy.asarray(other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, bool | int | str | bytes | None) and isinstance(other, bool | int | str | bytes | None):
        return one == other
    return type(one) is type(other)


def _same_arrays(one: Any, other: Any) -> bool:
    if one.dtype.hasobject or other.dtype.hasobject:
        return True
    inexact = one.dtype.kind in "fc"
    return one.dtype == other.dtype and bool(numpy.array_equal(one, other, equal_nan=inexact))
