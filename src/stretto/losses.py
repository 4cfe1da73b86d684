"""The usual losses as pairs: (sum of the losses, sum of their weights).

A mean of means is wrong as soon as two ranks or two microbatches hold different numbers of valid targets. A
sum and its weight can be added up over any cut, and divided once, at the end: every function here satisfies
``sum / weight == torch's loss with reduction="mean"`` on the whole batch, and its pairs over parts of a batch
add up to the pair of the whole.

Shapes are in brackets; ``*`` stands for any number of axes. Weights are given per example, that is for the
leading axes of the target: [batch] weighs whole samples, [batch, tokens] single tokens. Half-precision
outputs are widened to float32 before anything is summed. A weight is counted in int64 (no weights given) or
summed in float64, so that it is the same number under every cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import TaskError


def cross_entropy(
    output: Tensor, target: Tensor, ignore_index: int = -100, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats of class logits, the classes on the last axis.

    Args:
        output: logits [*, classes].
        target: class numbers [*], int64; those equal to ``ignore_index`` count neither in the sum nor in the
            weight.
        weights: per example, the leading axes of ``target``. For class weights pass
            ``class_weights[target.clamp(min=0)]``.

    Raises:
        TaskError: the shapes do not fit.
    """
    if output.ndim < 1 or output.shape[:-1] != target.shape:
        raise TaskError(
            f"cross_entropy: expected logits [*, classes] for a target [*], got {list(output.shape)} for "
            f"{list(target.shape)}; move the classes to the last axis"
        )
    # One flat pass; ignored positions come out as 0.
    losses = F.cross_entropy(
        _wide(output).reshape(-1, output.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    ).view(target.shape)
    return _pair(losses, weights, valid=target != ignore_index)


def binary_cross_entropy_with_logits(
    output: Tensor, target: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Binary cross entropy in nats of logits [*] for targets [*] between 0 and 1 (any number type).

    Raises:
        TaskError: the shapes do not fit.
    """
    return _elementwise("binary_cross_entropy_with_logits", _binary, output, target, weights)


def mse(output: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared error of each element, output [*] and target [*]; weighed by elements, as torch's mean is.

    Raises:
        TaskError: the shapes do not fit ([batch, 1] and [batch] would broadcast to every pair in silence).
    """
    return _elementwise("mse", _squared, output, target, weights)


def l1(output: Tensor, target: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Absolute error of each element, output [*] and target [*]; weighed by elements, as torch's mean is.

    Raises:
        TaskError: the shapes do not fit.
    """
    return _elementwise("l1", _absolute, output, target, weights)


def _binary(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="none")


def _absolute(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output, target, reduction="none")


def _wide(output: Tensor) -> Tensor:
    """At least float32: a sum of thousands of bf16 losses would keep two digits."""
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _elementwise(
    name: str,
    function: Callable[[Tensor, Tensor], Tensor],
    output: Tensor,
    target: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if output.shape != target.shape:
        raise TaskError(
            f"{name}: expected output and target of one shape, got {list(output.shape)} and "
            f"{list(target.shape)}; reshape one of them (squeeze, unsqueeze or view)"
        )
    wide = _wide(output)
    return _pair(function(wide, target.to(wide.dtype)), weights)


def _pair(losses: Tensor, weights: Tensor | None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weighted sum, sum of weights) of losses [*], ``weights`` on the leading axes, ``valid`` [*] or all."""
    if weights is None:
        if valid is not None:
            return losses.sum(), valid.sum()
        return losses.sum(), torch.tensor(losses.numel(), device=losses.device)
    if weights.shape != losses.shape[: weights.ndim]:
        raise TaskError(
            f"weights: expected the leading axes of {list(losses.shape)}, got {list(weights.shape)}; "
            "give one weight per sample, or one per element"
        )
    trailing = (1,) * (losses.ndim - weights.ndim)
    spread = weights.detach().reshape(*weights.shape, *trailing).expand_as(losses)
    if valid is not None:
        spread = spread * valid
    return (losses * spread.to(losses.dtype)).sum(), spread.sum(dtype=torch.float64)
