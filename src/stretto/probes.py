"""Probes: small experiments before launch that find what would break the law in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.errors import ProbeFailed, one_line
from stretto.task import Params

ROWS: Final = 6
COLUMNS: Final = 4
STEPS: Final = 3


def optimizer_cut_error(factory: Callable[[Params], Optimizer]) -> float:
    """How far an optimizer's update of a 6 x 4 parameter is from its updates of the two halves, over three steps.

    An optimizer that works element by element gives 0 exactly, and may be sharded. One that looks at a whole tensor (a
    row's mean, an orthogonal direction) gives about 1e-2, and sharding would change the numbers without a word.

    Returns:
        The largest absolute difference over the largest change of the whole parameter.

    Raises:
        ProbeFailed: the factory can't work on a parameter of the probe's own.
    """
    before = torch.get_rng_state()
    drawn = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, COLUMNS, generator=drawn, dtype=torch.float64)
    gradients = [torch.randn(ROWS, COLUMNS, generator=drawn, dtype=torch.float64) for _ in range(STEPS)]
    half = ROWS // 2
    try:
        whole = _trained(factory, start, gradients)
        top = _trained(factory, start[:half], [gradient[:half] for gradient in gradients])
        bottom = _trained(factory, start[half:], [gradient[half:] for gradient in gradients])
    except Exception as error:  # the factory is the user's, and may ask for anything
        raise ProbeFailed(one_line(error)) from error
    finally:
        torch.set_rng_state(before)
    moved = float((whole - start).abs().max())
    return float((whole - torch.cat([top, bottom])).abs().max()) / moved if moved else 0.0


def _trained(
    factory: Callable[[Params], Optimizer], start: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = factory(Params([("probe.weight", parameter)]))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
