"""Random numbers everywhere: dropout in forward; torch, numpy and random in ``__getitem__``.

One device cut into the same microbatches draws the same numbers as many devices do, or this task tells.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """x [features], y []: a fixed example, with a new noise, shift and sign each time it is read."""

    def __init__(self, size: int, features: int, classes: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, features, generator=drawn)
        self.y = self.x[:, :classes].abs().argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.rand(self.x.shape[1])
        shift = 0.1 * float(np.random.standard_normal())  # the global generator is the point
        sign = random.choice((-1.0, 1.0))
        return sign * (self.x[index] + noise + shift), self.y[index]


def data(size: int = 57, features: int = 12, classes: int = 4) -> dict[str, Dataset[Any]]:
    return {"train": Augmented(size, features, classes, 0), "val": Augmented(19, features, classes, 1)}


def model(
    features: int = 12, width: int = 32, classes: int = 4, dropout: float = 0.25, in_place: bool = False
) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width),
        nn.GELU(),
        nn.Dropout(dropout, in_place),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Dropout(dropout, in_place),
        nn.Linear(width, classes),
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    target = batch[1]
    return F.cross_entropy(output, target, reduction="sum"), torch.tensor(len(target), device=output.device)


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=11)
