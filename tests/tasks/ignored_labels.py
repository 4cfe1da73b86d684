"""An MLP over token positions of which a varied share has no label: unequal weights, and some of zero.

Every third sample has no valid label at all, so that in small batches whole ranks and microbatches weigh
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

IGNORED = -100


class Positions(Dataset[tuple[Tensor, Tensor]]):
    """x [length, features] and y [length]: the largest of the first ``classes`` features, or IGNORED."""

    def __init__(self, size: int, length: int, features: int, classes: int, seed: int) -> None:
        self.size, self.length, self.features, self.classes, self.seed = size, length, features, classes, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(self.seed + index)
        x = torch.randn(self.length, self.features, generator=drawn)
        y = x[:, : self.classes].argmax(dim=1)
        share = 1.0 if index % 3 == 1 else float(torch.rand((), generator=drawn))
        y[torch.rand(self.length, generator=drawn) < share] = IGNORED
        return x, y


def data(size: int = 59, length: int = 6, features: int = 10, classes: int = 5) -> dict[str, Dataset[Any]]:
    return {
        "train": Positions(size, length, features, classes, 0),
        "val": Positions(13, length, features, classes, 10_000),
    }


def model(features: int = 10, width: int = 24, classes: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return losses.cross_entropy(output, batch[1], ignore_index=IGNORED)


def metrics(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    valid = batch[1] != IGNORED
    return {"accuracy": ((output.argmax(-1) == batch[1]).logical_and(valid).sum(), valid.sum())}


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=5)
