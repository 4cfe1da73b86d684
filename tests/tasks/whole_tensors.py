"""Optimizers that look at whole tensors: Muon, Adafactor, and a LAMB (arXiv 1904.00962, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Lamb(Optimizer):
    """Adam whose step is scaled, a tensor at a time, to the norm of the tensor."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                mean, square = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
                step = mean / (square.sqrt() + 1e-6)
                p.add_(step, alpha=-group["lr"] * float(p.norm() / step.norm()))


def model(width: int = 7, depth: int = 3) -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(width if index else 4, width, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 2, bias=False))


def data(length: int = 26) -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(length, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x.prod(1)], 1))


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, kind: str = "muon") -> Optimizer:
    if kind == "muon":
        return torch.optim.Muon(params, lr=1e-2)
    return torch.optim.Adafactor(params, lr=1e-2) if kind == "adafactor" else Lamb(params, lr=1e-2)


def recipe(batch: int = 7, steps: int = 4) -> Recipe:
    return Recipe(batch=batch, steps=steps)
