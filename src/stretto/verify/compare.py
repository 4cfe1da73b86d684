"""The measure: how far two tensors are apart. All arithmetic is in float64, whatever the tensors' type."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable
from typing import Final

import torch

FURTHEST: Final = sys.float_info.max
"""Stands for a difference that is not finite, which JSON has no number for."""


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The values in float64, or complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def magnitude(tensors: Iterable[torch.Tensor]) -> float:
    """Largest finite absolute value in any of them; 0 where there is none."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel():
            values = wide(tensor).abs()
            largest = max(largest, float(values.masked_fill(~values.isfinite(), 0.0).max()))
    return largest


def gap(ours: torch.Tensor, theirs: torch.Tensor, left_out: torch.Tensor | None = None) -> float:
    """Largest absolute difference of two tensors of one shape, over the elements that are not ``left_out``.

    Infinities and NaNs are equal to themselves; beside anything else they are :data:`FURTHEST` away.
    """
    if not ours.numel():
        return 0.0
    a, b = wide(ours), wide(theirs)
    distance = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    if left_out is not None:
        same |= left_out
    return min(float(distance.masked_fill(~distance.isfinite(), FURTHEST).masked_fill(same, 0.0).max()), FURTHEST)


def relative(distance: float, scale: float) -> float:
    """A difference over a magnitude; any difference from nothing but zeros is :data:`FURTHEST`."""
    if distance == 0:
        return 0.0
    return min(distance / scale, FURTHEST) if scale > 0 else FURTHEST


def relative_numbers(ours: float, theirs: float) -> float:
    """The measure for single numbers, such as losses."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    distance = abs(ours - theirs)
    return relative(distance, abs(theirs)) if math.isfinite(distance) else FURTHEST


def ratio_of_numbers(ours: float, theirs: float) -> float | None:
    """``ours / theirs``, or None where that isn't a finite number."""
    ratio = ours / theirs if theirs else math.nan
    return ratio if math.isfinite(ratio) else None


def best_fit(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float | None, float | None]:
    """The factor s that brings ``s * theirs`` nearest to ``ours`` in least squares: <ours, theirs> / <theirs, theirs>.

    Returns:
        s, and the largest difference that is left over the largest magnitude of ``theirs``; None and None where
        ``theirs`` is zero everywhere or something isn't finite.
    """
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (wide(ours), wide(theirs)))
    a, b = a.flatten(), b.flatten()
    largest = magnitude([b])
    if largest == 0 or not bool(a.isfinite().all() and b.isfinite().all()):
        return None, None
    scaled = b / largest  # or tiny values would vanish when they are squared
    factor = float(a.dot(scaled) / scaled.dot(scaled)) / largest
    if not math.isfinite(factor):
        return None, None
    return factor, relative(gap(a, factor * b), largest)


def noise(ours: torch.Tensor, theirs: torch.Tensor, largest: float, quiet: float) -> torch.Tensor:
    """Which elements of a gradient are rounding noise: under ``quiet`` times the largest gradient of the step on one
    device (``theirs``), and not bit-equal. Boolean, of the gradients' shape."""
    return (wide(theirs).abs() < quiet * largest) & (ours.detach() != theirs.detach())


def digest(tensor: torch.Tensor) -> str:
    """Equal for bit-equal tensors of one type, and for no others."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).resolve_conj()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=8).hexdigest()
