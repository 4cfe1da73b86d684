"""Layers for which being computed twice is not the same as once; ``kind`` says in what way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Layer(nn.Module):
    """A residual layer; ``debug`` and ``shift`` are keywords that torch's checkpoint has as well, or doesn't know."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(2 * width) if kind.startswith("norm") else nn.Identity()
        self.last = nn.BatchNorm1d(width) if kind == "norms" else nn.Identity()
        self.calls, self.seen = 0, list[Tensor]()
        self.rng = np.random.default_rng(0)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor, history: list[Tensor], *, shift: Tensor, debug: bool) -> Tensor:
        if self.kind == "input":
            x.add_(0.1)
        h = self.norm(self.enter(x + shift)) if debug else x
        h = torch.relu_(h) if self.kind == "product" else F.gelu(h)
        if self.kind == "draws":
            h = F.dropout(h, 0.3, self.training) * (1 + 0.1 * float(np.random.standard_normal()))
            h = h.exp().log1p() * random.choice((0.5, 1.5))
        if self.kind == "generator":
            h = h.exp().log1p() * (1 + 0.1 * float(self.rng.standard_normal()))
        if self.kind == "attributes":
            self.calls += 1
            self.total = self.total + 1
            h = h.exp().log1p() * (1 + 0.1 * self.calls + 0.1 * self.total)
            self.seen.append(h.square().mean())
        if self.kind == "buffer":
            h = h * self.total.add_(1).clone()
        if self.kind == "cache":
            history.append(h)
            h = torch.stack(history).sum(0)
        out: Tensor = x + self.last(self.leave(h))
        return out


class Layers(nn.Module):
    """[batch, 2] to [batch, 1]; the first layer is frozen, the last one's and the head's matrices are one."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.head = nn.Linear(2, width), nn.Linear(width, width)
        self.layers = nn.ModuleList([Layer(width, kind) for _ in range(3)])
        self.layers[0].requires_grad_(False)
        self.tail = nn.Linear(width, width)
        self.tail.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        h, shift = self.enter(x), x.new_full((), 0.2)
        history: list[Tensor] = []
        for layer in self.layers:
            h = layer(h, history, shift=shift, debug=True)
            if self.kind == "later":
                shift.mul_(1.5)
        out = self.tail(torch.tanh(self.head(h))).sum(-1, keepdim=True)
        for layer in self.layers:
            out = out + sum(layer.seen)
            layer.seen.clear()
        return out


def model(kind: str = "draws", width: int = 6) -> nn.Module:
    return Layers(width, kind)


def data(length: int = 23) -> Dataset[Any]:
    x = torch.randn(length, 2, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, 2 * x[:, :1] - torch.sin(x[:, 1:]))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(params), lr=lr)


def recipe(batch: int = 7, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0, seed=5)
