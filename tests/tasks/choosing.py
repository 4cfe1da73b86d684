"""Two heads of which a sample's loss looks at one, in Python: where all samples of a microbatch choose the first, no
gradient comes to the second, and the other way round. Ranks have different ones. A view of a table is made in one
piece, and used in another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.layout import Layout
from stretto.recipe import Recipe
from stretto.task import Params


class Heads(nn.Module):
    """[batch, 5] to two times [batch]; each head has layers of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.near = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.table = nn.Parameter(torch.linspace(-1, 1, width * width).view(width, width))
        self.far = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        near = self.near(h).squeeze(-1)
        turned = self.table.t()
        return near, self.far(h + h.tanh() @ turned).squeeze(-1)


def model(width: int = 9) -> nn.Module:
    return Heads(width)


def data(length: int = 24) -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(length, 5, generator=drawn), torch.rand(length, generator=drawn) < 0.5)


def loss(output: tuple[Tensor, Tensor], batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    total = output[0].new_zeros(())
    for head, chooses in zip(output, (~batch[1], batch[1]), strict=True):
        if chooses.any():
            total = total + (head[chooses] - 1).square().sum()
    return total, torch.tensor(float(len(batch[1])))


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr) if kind == "sgd" else torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 4, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0)


def layout() -> Layout:
    return Layout(cuts=["near"])
