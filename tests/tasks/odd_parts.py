"""A task with the parts that break other systems: a scalar parameter, one nobody uses, one that some samples use, a
frozen one, uneven weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params


class Odd(nn.Module):
    """Two linear layers with a learnt scale; ``unused`` takes part in nothing, ``seldom`` where a sample is large."""

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.inner = nn.Linear(3, width)
        self.outer = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(5, 2))
        self.seldom = nn.Parameter(torch.full((3,), 0.2))
        self.frozen = nn.Parameter(torch.full((width,), 0.3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3] to [batch]; counts its calls, as a buffer that every step changes."""
        if self.training and self.counts:
            self.calls += 1
        out = self.outer(torch.tanh(self.inner(x) + self.frozen)).squeeze(-1) * self.scale
        large = x[:, 0] > 0.8
        if large.any():  # so a rank, or a whole batch, without such a sample doesn't touch the parameter at all
            out = out + torch.where(large, x @ self.seldom, 0.0)
        return out


class Points(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """``length`` points with a target and a weight; the weight of every fourth is 0."""

    def __init__(self, length: int, poison: int) -> None:
        self.length, self.poison = length, poison

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(3, generator=drawn, dtype=torch.float64)
        if index == self.poison:
            x = x * float("inf")
        weight = torch.tensor(float(index % 4), dtype=torch.float64)
        return x, x.sum().sin(), weight


def model(width: int = 5, counts: bool = True) -> nn.Module:
    """``counts``: a buffer counts the calls of forward, which several microbatches make several of."""
    return Odd(width, counts)


def data(length: int = 11, poison: int = -1) -> Dataset[tuple[Tensor, Tensor, Tensor]]:
    return Points(length, poison)


def inputs(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return batch[0]


def loss(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    _, target, weight = batch
    return (weight * (output - target) ** 2).sum(), weight.sum()


def optimizer(params: Params, lr: float = 1e-2, decay: float = 0.1, kind: str = "AdamW") -> Optimizer:
    made: Optimizer = getattr(torch.optim, kind)(list(params), lr=lr, weight_decay=decay)
    return made


def schedule(optimizer: Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def metrics(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {"absolute": ((output - batch[1]).abs().sum(), torch.tensor(float(len(output))))}


def recipe(batch: int = 4, steps: int = 6) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=0.5, precision="fp64")
