"""A value that every layer uses, so that wherever the model is cut it goes over stages to later ones, and several
stages use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Skips(nn.Module):
    """[batch, 5] to [batch, 1]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.enter(x))
        h = first
        for layer in self.layers:
            h = torch.tanh(layer(h)) + first
        found: Tensor = self.leave(h)
        return found


def model(width: int = 16, depth: int = 16) -> nn.Module:
    return Skips(width, depth)


def data(length: int = 45) -> TensorDataset:
    x = torch.randn(length, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr) if kind == "sgd" else torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 6, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0)
