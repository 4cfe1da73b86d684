"""Parameters that are there only while they are used: where pieces begin, and what is done without them."""

from __future__ import annotations

import pytest
import torch

from stretto.graph.pieces import even_starts
from stretto.parallel.deferred import Deferred, _Convolution, _Linear, work_off


@pytest.mark.parametrize(
    ("weights", "edges", "least", "starts"),
    [
        ([5, 0, 5, 0, 5], [1, 2, 3, 4], 1, [1, 3]),  # one with parameters each
        ([5, 0, 5, 0, 5], [1, 2, 3, 4], 6, [3]),
        ([5, 0, 5, 0, 5], [4], 1, [4]),  # it can't be cut before
        ([5, 5, 0, 0], [1, 2, 3], 1, [1]),  # no piece without any at the end
        ([0, 0, 9], [1, 2], 1, []),
        ([3, 3], [1], 10, []),
    ],
)
def test_pieces_have_about_as_many_parameters_each(
    weights: list[int], edges: list[int], least: int, starts: list[int]
) -> None:
    assert even_starts(weights, edges, least) == starts


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_gradients_that_are_put_off_are_made_without_the_weight(groups: int, bias: bool) -> None:
    """``groups``: of a convolution; 0: a linear layer."""
    torch.manual_seed(0)
    layer, deferred = (_Convolution, Deferred()) if groups else (_Linear, Deferred())
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4 // groups, 3, dtype=x.dtype) if groups else torch.randn(5, 6, dtype=x.dtype)
    weight.requires_grad_()
    of_bias = torch.randn(weight.shape[0], dtype=x.dtype, requires_grad=True) if bias else None
    more = ([1], [1], [1], groups) if groups else ()

    def run() -> torch.Tensor:
        found: torch.Tensor = layer(deferred, alone=True)(x, weight, of_bias, *more)
        return found.sin().sum()

    inputs = [x, weight, *([of_bias] if of_bias is not None else [])]
    expected = torch.autograd.grad(run(), inputs)
    total = run()
    put_off = deferred.collect(lambda: total.backward())  # type: ignore[no-untyped-call]
    assert x.grad is not None and weight.grad is None
    weight.untyped_storage().resize_(0)
    work_off(put_off)
    for one, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(one.grad, gradient, rtol=1e-14, atol=1e-14)
