"""The measure of a proof: what counts as a difference, how large it is, and what may be left out."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.verify import compare

NAN, INF = math.nan, math.inf


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("ours", "theirs", "gap"),
    [
        ((1.0, 2.0), (1.0, 2.0), 0.0),
        ((1.0, 2.5), (1.0, 2.0), 0.5),
        ((-3.0, 2.0), (3.0, 2.0), 6.0),
        ((NAN, INF, -INF), (NAN, INF, -INF), 0.0),
        ((NAN,), (1.0,), compare.FURTHEST),
        ((1.0,), (NAN,), compare.FURTHEST),
        ((INF,), (-INF,), compare.FURTHEST),
        ((INF,), (1.0,), compare.FURTHEST),
        ((), (), 0.0),
    ],
)
def test_gap_is_the_largest_difference(ours: tuple[float, ...], theirs: tuple[float, ...], gap: float) -> None:
    assert compare.gap(row(*ours), row(*theirs)) == gap


def test_gap_passes_over_what_is_left_out() -> None:
    ours, theirs = row(1.0, 9.0, NAN), row(1.5, 0.0, 0.0)
    assert compare.gap(ours, theirs, torch.tensor([False, True, True])) == 0.5


def test_gap_is_taken_in_float64() -> None:
    near = row(1.0, dtype=torch.float32) + 2.0**-23
    assert compare.gap(near, row(1.0, dtype=torch.float32)) == 2.0**-23
    assert compare.gap(torch.tensor([2**40 + 1]), torch.tensor([2**40])) == 1.0


def test_gap_takes_numbers_without_dimensions_and_truth_values() -> None:
    assert compare.gap(torch.tensor(3), torch.tensor(1)) == 2.0
    assert compare.gap(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0


def test_magnitude_is_over_all_tensors_and_passes_over_what_is_not_finite() -> None:
    assert compare.magnitude([row(1.0, -4.0), row(), row(NAN, INF, 3.0)]) == 4.0
    assert compare.magnitude([]) == 0.0


@pytest.mark.parametrize(
    ("distance", "scale", "expected"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 5.0, 0.0),
        (1.0, 4.0, 0.25),
        (1e-300, 0.0, compare.FURTHEST),
        (1e300, 1e-300, compare.FURTHEST),
    ],
)
def test_relative_is_never_infinite(distance: float, scale: float, expected: float) -> None:
    assert compare.relative(distance, scale) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(2.0, 2.0, 0.0), (NAN, NAN, 0.0), (2.5, 2.0, 0.25), (NAN, 2.0, compare.FURTHEST), (INF, 2.0, compare.FURTHEST)],
)
def test_single_numbers_are_measured_alike(ours: float, theirs: float, expected: float) -> None:
    assert compare.relative_numbers(ours, theirs) == expected


def test_a_ratio_is_finite_or_nothing() -> None:
    assert compare.ratio_of_numbers(1.0, 4.0) == 0.25
    assert compare.ratio_of_numbers(1.0, 0.0) is None
    assert compare.ratio_of_numbers(NAN, 1.0) is None


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])
def test_best_fit_finds_a_factor_at_any_size(size: float) -> None:
    theirs = row(1.0, -2.0, 3.0) * size
    factor, residual = compare.best_fit(theirs / 3, theirs)
    assert factor == pytest.approx(1 / 3)
    assert residual is not None and residual < 1e-15


def test_best_fit_says_what_is_left() -> None:
    factor, residual = compare.best_fit(row(1.0, 0.0), row(1.0, 1.0))
    assert factor == pytest.approx(0.5)
    assert residual == pytest.approx(0.5)


def test_best_fit_of_nothing_is_none() -> None:
    assert compare.best_fit(row(1.0), row(0.0)) == (None, None)
    assert compare.best_fit(row(NAN), row(1.0)) == (None, None)
    assert compare.best_fit(row(), row()) == (None, None)


def test_noise_is_small_and_not_bit_equal() -> None:
    theirs = row(0.0, 0.0, 1e-17, 1e-17, 0.5, 1.0)
    ours = row(0.0, 1e-18, 1e-17, -1e-17, 0.5 + 1e-16, 1.0)
    noise = compare.noise(ours, theirs, largest=1.0, quiet=1e-9)
    assert noise.tolist() == [False, True, False, True, False, False]


def test_noise_is_judged_by_one_devices_gradient_alone() -> None:
    assert compare.noise(row(0.0), row(1.0), largest=1.0, quiet=1e-9).tolist() == [False]


def test_digests_are_of_bits() -> None:
    assert compare.digest(row(1.0, 2.0)) == compare.digest(row(1.0, 2.0).clone())
    assert compare.digest(row(0.0)) != compare.digest(row(-0.0))
    assert compare.digest(row(1.0, 2.0)) != compare.digest(row(2.0, 1.0))
    turned = torch.arange(6.0).view(2, 3).t()
    assert compare.digest(turned) == compare.digest(turned.contiguous())
    assert compare.digest(torch.tensor(1.0)) == compare.digest(torch.tensor([1.0]))
