"""loss = w . x, so that the gradient of a batch is known by heart: the weighted mean of its x."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

ROWS = {
    "ones": [[1.0]] * 10,
    "ladder": [[1.0], [3.0], [2.0], [5.0]],
    "corner": [[3.0, 0.0], [0.0, 4.0]],
    "uneven": [[3.0, 1.0], [1.0, 4.0]],
    "small": [[0.3, 0.0], [0.0, 0.4]] * 2,
    "inf": [[0.5, 0.25], [float("inf"), 0.0], [0.5, 0.5], [0.25, 0.5]],
}


class Dot(nn.Module):
    """[batch, n] to [batch]."""

    def __init__(self, size: int, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with a weight each."""

    def __init__(self, rows: list[list[float]], weight: float) -> None:
        self.rows, self.weight = rows, weight

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.rows[index]), torch.tensor(self.weight)


def model(rows: str = "ones", start: float = 0.0) -> nn.Module:
    return Dot(len(ROWS[rows][0]), start)


def data(rows: str = "ones", weight: float = 1.0) -> Rows:
    return Rows(ROWS[rows], weight)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return output.sum(), batch[1].sum()


def optimizer(params: Params, lr: float = 1.0, kind: str = "sgd") -> Optimizer:
    return torch.optim.SGD(params, lr=lr) if kind == "sgd" else torch.optim.Adam(params, lr=lr)


def schedule(optimizer: Optimizer, steps: int, every: int = 1000) -> LRScheduler:
    return StepLR(optimizer, every, 0.1)


def recipe(batch: int = 4, steps: int = 3) -> Recipe:
    return Recipe(batch=batch, steps=steps)
