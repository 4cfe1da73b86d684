"""Small models whose parts trained wrongly elsewhere; ``kind`` chooses. The samples' mean jumps from 0 to 10 in the
middle, so that ranks which cut them in order see different data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Unused(nn.Module):
    """Of two layers only one takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Branches(nn.Module):
    """A frozen branch beside a trained one, both recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(3, 4)
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.leave = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = h + checkpoint(self.frozen, h, use_reentrant=self.reentrant)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.leave(h)


class Reordered(nn.Module):
    """Layers in another order than they are registered, one of them twice: gradients come in neither order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(5, 1), nn.Linear(5, 5), nn.Linear(3, 5)
        self.twice = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.twice(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.twice(self.middle(h))))


class Backbone(nn.Module):
    """A module that is frozen as a whole, BatchNorm and all, before a trained one; ``thaw`` unfreezes it at that
    call."""

    def __init__(self, thaw: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(4, 1)
        self.thaw, self.calls = thaw, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.thaw:
            self.backbone[0].weight.requires_grad_(True)
        return self.head(self.backbone(x))


def model(kind: str = "norm", reentrant: bool = False, thaw: int = 0) -> nn.Module:
    if kind == "norm":
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    if kind == "frozen":
        return nn.Linear(3, 1).requires_grad_(False)
    if kind == "branches":
        return Branches(reentrant)
    return Backbone(thaw) if kind == "backbone" else {"unused": Unused, "reordered": Reordered}[kind]()


def data(length: int = 24) -> TensorDataset:
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[length // 2 :] += 10
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, lr: float = 0.05, kind_of_step: str = "adamw") -> Optimizer:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind_of_step == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.5)
    return torch.optim.AdamW(groups, lr=lr)


def recipe(batch: int = 8, steps: int = 10) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0)
