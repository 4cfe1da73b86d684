"""A curve learnt in a moment; ``how`` plants a mistake in rank 1: in its loss, or an end at the third step."""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.launch import current
from stretto.losses import mse
from stretto.recipe import Recipe

_calls = count(1)


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


def data(points: int = 64) -> Dataset[Any]:
    x = torch.linspace(-3, 3, points).unsqueeze(1)
    return TensorDataset(x, torch.sin(2 * x))


def loss(output: Tensor, batch: tuple[Tensor, Tensor], how: str = "well") -> tuple[Tensor, Tensor]:
    context = current()
    on_rank_1 = context is not None and context.rank == 1 and next(_calls) > 2
    if how == "raise" and on_rank_1:
        raise RuntimeError("a planted fault")
    if how == "exit" and on_rank_1:
        sys.exit(7)
    if how == "slow":
        time.sleep(0.02)
    total, weight = mse(output, batch[1])
    return total * (1.5 if how == "by rank" and context is not None and context.rank == 1 else 1.0), weight


def optimizer(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def recipe(batch: int = 8, steps: int = 8, save_every: int = 0) -> Recipe:
    return Recipe(batch=batch, steps=steps, save_every=save_every)
