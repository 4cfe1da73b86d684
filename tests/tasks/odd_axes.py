"""Small models with what breaks when layers are cut or stages are: ``kind`` chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.layout import Layout
from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params

WIDTH = 10


class Flags(nn.Module):
    """(x [batch, 10], None, a truth value); what comes first is needed by the last layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, flag: bool = False
    ) -> tuple[Tensor, None, bool]:
        first = torch.tanh(self.first(x))
        second = torch.tanh(self.second(first)) * scale
        if mask is not None:
            second = second * mask
        third = self.third(second) + first
        return (third if flag else -third), None, flag


class Narrow(nn.Module):
    """(x [batch, 10], None, True); between its layers there are seven features, and two."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
        self.two = nn.Sequential(nn.Linear(WIDTH, 2), nn.GELU(), nn.Linear(2, WIDTH))

    def forward(self, x: Tensor, **unused: Any) -> tuple[Tensor, None, bool]:
        return self.two(self.seven(x)), None, True


class Heads(nn.Module):
    """(x [batch, 10], None, True); five heads of two features look at ten places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(1, WIDTH), nn.LayerNorm(WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 5, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, **unused: Any) -> tuple[Tensor, None, bool]:
        h = self.features(x.unsqueeze(-1))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(h).squeeze(-1), None, True


KINDS = {"flags": Flags, "narrow": Narrow, "heads": Heads}


def model(kind: str = "flags") -> nn.Module:
    return KINDS[kind]()


def layout(kind: str = "flags") -> Layout:
    return Layout(cuts=("second", "third") if kind == "flags" else ())


def data() -> TensorDataset:
    x = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.cumsum(1).sin())


def inputs(batch: list[Tensor]) -> dict[str, Any]:
    return {"x": batch[0], "mask": None, "scale": 2.0, "flag": True}


def loss(output: tuple[Tensor, None, bool], batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, nothing, flag = output
    assert nothing is None and flag is True, output
    return mse(x, batch[1].to(x.dtype))


def optimizer(params: Params, lr: float = 3e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def recipe(batch: int = 6, steps: int = 3) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0)
