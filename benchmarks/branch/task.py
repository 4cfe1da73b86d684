"""Two equal towers of wide layers, and a score of what they give: work for a processor, little to send."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Towers(nn.Module):
    """[batch, 2, width] to [batch, 1]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        one, other = (
            nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))
            for _ in range(2)
        )
        self.one, self.other, self.score = one, other, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.score(self.one(x[:, 0]) * self.other(x[:, 1]))
        return found


def model(width: int = 512, depth: int = 6) -> nn.Module:
    return Towers(width, depth)


def data(length: int = 1024, width: int = 512) -> TensorDataset:
    x = torch.randn(length, 2, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, 0, :1] * x[:, 1, :1])


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1])


def optimizer(params: Params, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def recipe(batch: int = 256) -> Recipe:
    return Recipe(batch=batch, steps=1_000_000)
