"""Models that other systems, and an earlier state of this one, computed wrongly without a word; ``kind`` chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from stretto.losses import mse
from stretto.recipe import Recipe
from stretto.task import Params


class Residual(nn.Module):
    """x + tanh(Linear(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Trap(nn.Module):
    """Two inputs, one output; what stands between is chosen by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(2, 6), nn.Linear(6, 1)
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.empty = nn.Parameter(torch.ones(0, 3))
        if kind == "complex":
            self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3) + 1.0))
        if kind == "hook":
            self.leave.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        if kind in ("max_norm", "frequencies"):
            shorten, frequent = 1.0 if kind == "max_norm" else None, kind == "frequencies"
            self.table = nn.Embedding(2, 6, max_norm=shorten, scale_grad_by_freq=frequent)
        if kind == "closure":
            captured = self.leave.bias
            self.act = lambda x: x + captured

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 2] to [batch, 1]."""
        h = self.enter(x)
        if self.kind == "experts":  # each sample chooses its layer
            out = torch.zeros_like(h)
            for index, layer in enumerate(self.layers):
                chosen = (x[:, 0] > 0) == bool(index)
                if chosen.any():
                    out = out.index_put((chosen.nonzero().squeeze(1),), layer(h[chosen]))
            return self.leave(out)
        if self.kind == "reentrant":  # a shared layer whose gradient comes in two parts
            h = checkpoint(self.layers[0], h, use_reentrant=True)
            return self.leave(checkpoint(self.layers[0], self.layers[1](h), use_reentrant=True))
        if self.kind == "complex":
            turned = torch.view_as_complex(h.view(-1, 3, 2).contiguous()) * self.turn
            h = torch.view_as_real(turned).flatten(1)
        if self.kind in ("max_norm", "frequencies"):
            h = h + self.table((x[:, 0] > 0).long())
        if self.kind == "clamped":
            with torch.no_grad():
                self.enter.weight.clamp_(-0.1, 0.1)
        if self.kind == "data":
            self.enter.weight.data.clamp_(-0.1, 0.1)
        if self.kind == "replaced":
            self.enter.weight.data = self.enter.weight.detach().clamp(-0.1, 0.1)
        if self.kind == "moved":  # as LSTM.flatten_parameters() does on an accelerator
            self.enter.weight.data = self.enter.weight.detach().clone()
        if self.kind == "func":
            h = h + torch.func.grad(lambda y: (y**3).sum())(h)
        for layer in self.layers:
            h = layer(h)
        return self.leave(self.act(h) if self.kind == "closure" else h)


def model(kind: str = "plain") -> nn.Module:
    return Trap(kind)


def data(length: int = 12) -> Dataset[tuple[Tensor, ...]]:
    x = torch.randn(length, 2, generator=torch.Generator().manual_seed(3))
    x[:, 0] = x[:, 0].abs() * (1 - 2 * (torch.arange(length) % 2))
    return TensorDataset(x, 2 * x[:, :1] - torch.sin(x[:, 1:]))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output, batch[1].to(output.dtype))


def optimizer(params: Params, optim: str = "AdamW") -> Optimizer:
    more = {"initial_accumulator_value": 0.1} if optim == "Adagrad" else {}
    made: Optimizer = getattr(torch.optim, optim)(list(params), lr=1e-2, **more)
    return made


def recipe(batch: int = 5, steps: int = 6) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0, precision="fp64")
