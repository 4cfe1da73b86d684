"""The losses against torch's mean reductions, whole and in parts, and the mistakes they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto import losses
from stretto.errors import TaskError

Loss = Callable[..., tuple[Tensor, Tensor]]

ELEMENTWISE: list[tuple[Loss, Callable[..., Tensor]]] = [
    (losses.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits),
    (losses.mse, F.mse_loss),
    (losses.l1, F.l1_loss),
]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def labels(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 7), (2, 3, 4)])
def test_cross_entropy_divided_is_torch_mean(shape: tuple[int, ...]) -> None:
    output = draw(*shape, 6).requires_grad_()
    target = labels(*shape, classes=6)
    target.view(-1)[1::3] = -100
    total, weight = losses.cross_entropy(output, target)
    expected = F.cross_entropy(output.reshape(-1, 6), target.reshape(-1))
    assert weight.item() == (target != -100).sum().item()
    assert_same(total / weight, expected)
    (gradient,) = torch.autograd.grad(total / weight, output)
    (expected_gradient,) = torch.autograd.grad(expected, output)
    assert_same(gradient, expected_gradient)


def test_cross_entropy_of_one_unbatched_target() -> None:
    output, target = draw(4), torch.tensor(2)
    total, weight = losses.cross_entropy(output, target)
    assert_same(total / weight, F.cross_entropy(output, target))


def test_another_ignore_index() -> None:
    output, target = draw(6, 3), labels(6, classes=3)
    total, weight = losses.cross_entropy(output, target, ignore_index=0)
    assert weight.item() == (target != 0).sum().item()
    assert_same(total / weight, F.cross_entropy(output, target, ignore_index=0))


def test_nothing_valid_is_a_zero_with_zero_weight_and_zero_gradient() -> None:
    output = draw(4, 3).requires_grad_()
    total, weight = losses.cross_entropy(output, torch.full((4,), -100))
    assert total.item() == 0 and weight.item() == 0
    (gradient,) = torch.autograd.grad(total, output)
    assert gradient.abs().max().item() == 0


def test_cross_entropy_with_class_weights_is_torch_weight() -> None:
    output, target = draw(9, 3), labels(9, classes=3)
    class_weights = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    total, weight = losses.cross_entropy(output, target, weights=class_weights[target])
    assert_same(total / weight, F.cross_entropy(output, target, weight=class_weights))


def test_a_weighted_sample_weighs_each_of_its_valid_tokens() -> None:
    output, target = draw(3, 4, 5), labels(3, 4, classes=5)
    target[0, 1:] = -100
    total, weight = losses.cross_entropy(output, target, weights=torch.tensor([2.0, 0.0, 0.5]))
    each = F.cross_entropy(output.view(-1, 5), target.view(-1), reduction="none").view(3, 4)
    assert_same(total, 2 * each[0].sum() + 0.5 * each[2].sum())
    assert weight.item() == 2 * 1 + 0.5 * 4


@pytest.mark.parametrize(("loss", "reference"), ELEMENTWISE)
@pytest.mark.parametrize("shape", [(), (5,), (5, 3)])
def test_elementwise_divided_is_torch_mean(
    loss: Loss, reference: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    output, target = draw(*shape), draw(*shape, 1)[..., 0].sigmoid()
    total, weight = loss(output, target)
    assert weight.item() == output.numel()
    assert_same(total / weight, reference(output, target))


@pytest.mark.parametrize(("loss", "reference"), ELEMENTWISE)
def test_elementwise_weights_per_sample_and_per_element(loss: Loss, reference: Callable[..., Tensor]) -> None:
    output, target = draw(4, 3), draw(4, 3, 1)[..., 0].sigmoid()
    each = reference(output, target, reduction="none")
    per_sample = torch.tensor([1.0, 0.0, 2.5, 0.25])
    total, weight = loss(output, target, per_sample)
    assert_same(total, (each * per_sample[:, None]).sum())
    assert weight.item() == 3 * per_sample.sum().item()
    per_element = draw(4, 3, 2)[..., 0].abs()
    total, weight = loss(output, target, per_element)
    assert_same(total, (each * per_element).sum())
    assert_same(weight, per_element.sum())


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_pairs_of_parts_add_up_to_the_pair_of_the_whole(cut: int) -> None:
    output, target, weights = draw(7, 5, 3), labels(7, 5, classes=3), draw(7).abs().float()
    target[2], target[5, :2] = -100, -100
    soft = draw(7, 5, 3, 1)[..., 0].sigmoid()
    parts = [slice(0, cut), slice(cut, 7)]
    for given in (None, weights):
        for loss, goal in [(losses.cross_entropy, target)] + [(loss, soft) for loss, _ in ELEMENTWISE]:
            whole = loss(output, goal, weights=given)
            halves = [loss(output[p], goal[p], weights=None if given is None else given[p]) for p in parts]
            for i in (0, 1):
                assert_same(halves[0][i] + halves[1][i], whole[i])


def test_bf16_outputs_are_summed_in_float32() -> None:
    output = torch.ones(4096, dtype=torch.bfloat16)
    target = torch.full((4096,), 0.99)  # rounds to 0.9922 in bf16, where the error would be 0.0078
    total, weight = losses.l1(output, target)
    assert total.dtype == torch.float32
    assert abs(total.item() / weight.item() - 0.01) < 1e-6
    logits = draw(512, 8).bfloat16()
    total, _ = losses.cross_entropy(logits, labels(512, classes=8))
    assert total.dtype == torch.float32


def test_float32_weights_sum_the_same_under_every_cut() -> None:
    weights = (torch.arange(1000) % 7 + 0.1).float()
    output, target = torch.zeros(1000), torch.ones(1000)
    whole = losses.mse(output, target, weights)[1]
    parts = sum(losses.mse(output[i:j], target[i:j], weights[i:j])[1].item() for i, j in [(0, 333), (333, 1000)])
    assert whole.dtype == torch.float64
    assert abs(parts - whole.item()) < 1e-12 * whole.item()


def test_integer_targets_are_accepted() -> None:
    output, target = draw(6), labels(6, classes=2)
    total, weight = losses.binary_cross_entropy_with_logits(output, target)
    assert_same(total / weight, F.binary_cross_entropy_with_logits(output, target.double()))


@pytest.mark.parametrize(("loss", "_"), ELEMENTWISE)
def test_a_broadcast_that_would_pair_everything_is_refused(loss: Loss, _: object) -> None:
    with pytest.raises(TaskError, match=r"one shape, got \[4, 1\] and \[4\]"):
        loss(draw(4, 1), draw(4))


def test_classes_on_another_axis_are_refused() -> None:
    with pytest.raises(TaskError, match="classes to the last axis"):
        losses.cross_entropy(draw(2, 5, 3), labels(2, 3, classes=5))
    with pytest.raises(TaskError, match="classes to the last axis"):
        losses.cross_entropy(torch.tensor(1.0), torch.tensor(0))


def test_weights_on_another_axis_are_refused() -> None:
    with pytest.raises(TaskError, match="leading axes"):
        losses.mse(draw(4, 3), draw(4, 3), torch.ones(3))
