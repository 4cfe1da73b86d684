"""Layers that run side by side: a stem with three branches of unequal depth, one encoder for two halves of the input,
or both with dropout in each; what they give is joined and goes through a tail."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


def layers(width: int, depth: int, rate: float) -> nn.Sequential:
    found: list[nn.Module] = []
    for _ in range(depth):
        found += [nn.Linear(width, width), nn.Tanh(), *([nn.Dropout(rate)] if rate else [])]
    return nn.Sequential(*found)


class Stem(nn.Module):
    """[batch, 6] to [batch, 1]."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.branches = nn.ModuleList(layers(width, depth, rate) for depth in (4, 1, 2))
        self.tail = nn.Sequential(nn.Linear(3 * width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        found: Tensor = self.tail(torch.cat([branch(x) for branch in self.branches], -1))
        return found


class Siamese(nn.Module):
    """[batch, 6] to [batch, 1]; both halves go through the same layers."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, width), layers(width, 3, rate))
        self.tail = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.encoder(x[:, :3]), self.encoder(x[:, 3:])
        found: Tensor = self.tail(one * other)
        return found


class Turns(nn.Module):
    """[batch, 6] to [batch, 1]; two towers that draw random numbers by turns, layer by layer."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.one, self.other = (nn.ModuleList(nn.Linear(6, 6) for _ in range(3)) for _ in range(2))
        self.rate, self.tail = rate, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = b = x
        for one, other in zip(self.one, self.other, strict=True):
            a = nn.functional.dropout(one(a).tanh(), self.rate, self.training)
            b = nn.functional.dropout(other(b).tanh(), self.rate, self.training)
        found: Tensor = self.tail(a * b)
        return found


def model(kind: str = "stem", width: int = 10, rate: float = 0.0) -> nn.Module:
    return {"stem": Stem, "siamese": Siamese, "turns": Turns}[kind](width, rate)


def data(length: int = 45) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.prod(1, keepdim=True).tanh())


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, lr: float = 1e-2, optimizer: str = "adamw") -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr) if optimizer == "sgd" else torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0)
