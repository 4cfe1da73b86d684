"""Tasks whose numbers depend on how a batch is cut, each in a way of its own; ``kind`` chooses."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

Batch = tuple[Tensor, ...]
WIDTH = 6


class Points(Dataset[tuple[Tensor, ...]]):
    """x [6], y []; for ``stateful`` the x of a sample is another each time it is read."""

    def __init__(self, kind: str) -> None:
        self.kind, self.reads = kind, count()
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, WIDTH, generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x = self.x[index]
        if self.kind == "stateful":
            x = x + 0.01 * next(self.reads)
        if self.kind in ("padding", "own mean"):
            return x[: 1 + index % WIDTH], x.sum()
        return x, x.sum()


class Center(nn.Module):
    """x without the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class SoftmaxOverBatch(nn.Module):
    """A softmax over the wrong axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


class Noise(nn.Module):
    """Random numbers that no seed of the run reaches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.drawn = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "own generator":
            return x + 0.1 * torch.randn(x.shape, generator=self.drawn)
        return x * (1 + int.from_bytes(os.urandom(2), "little") / 2**16)

    def __deepcopy__(self, memo: dict[int, Any]) -> Noise:
        return Noise(self.kind)  # a generator can't be copied


class Running(nn.Module):
    """Keeps a running mean of what it sees, and uses it in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x


class Experts(nn.Module):
    """A soft choice of two experts. ``output``: the balance of the choice is a number beside the output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.gate(x).softmax(-1)
        out = torch.stack([expert(x).squeeze(-1) for expert in self.experts], -1)
        share = chosen.mean(0)
        balance = (share * share).sum() if self.kind == "balance in the model" else chosen
        return (out * chosen).sum(-1), balance


class Mean(nn.Module):
    """Averages padded sequences [batch, length] without a mask, or makes its own mean loss of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = x * self.scale + self.bias
        if self.kind == "own mean":
            return ((each - y.unsqueeze(1)) ** 2)[mask].mean()
        return each.mean(1)


_LAYERS = {
    "batch mean": Center,
    "no labels": Center,
    "softmax over batch": SoftmaxOverBatch,
    "running mean": Running,
}


def model(kind: str = "contrast") -> nn.Module:
    if kind.startswith("balance"):
        return Experts(kind)
    if kind in ("padding", "own mean"):
        return Mean(kind)
    if kind in ("own generator", "system noise"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Noise(kind), nn.Linear(WIDTH, 1))
    if kind == "instance norm":
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(WIDTH, 1))
    if kind == "zero gate":
        return Gated()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), _LAYERS.get(kind, nn.Tanh)(), nn.Linear(WIDTH, 1))


class Gated(nn.Module):
    """A branch that mixes the batch, behind a gate that begins at zero: the first steps don't show it."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.branch, self.gate = nn.Linear(WIDTH, 1), Center(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.gate * self.branch(x))


def data(kind: str = "contrast") -> Dataset[Any]:
    return Points(kind)


def collate(samples: list[Any], kind: str = "contrast") -> Any:
    if kind in ("padding", "own mean"):
        lengths = torch.tensor([len(x) for x, _ in samples])
        x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return x, torch.stack([y for _, y in samples]), torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    if kind == "collate":
        x = (x - x.mean(0)) / x.std(0)
    return x, y


def inputs(batch: Batch, kind: str = "contrast") -> Any:
    return tuple(batch) if kind in ("padding", "own mean") else batch[0]


def loss(output: Any, batch: Batch, kind: str = "contrast") -> Any:
    y = batch[1]
    if kind == "contrast":
        similar = output @ output.T + torch.outer(y, y)
        return F.cross_entropy(similar, torch.arange(len(y)), reduction="sum"), len(y)
    if kind == "balance in the loss":
        out, chosen = output
        share = chosen.mean(0)
        return ((out - y) ** 2).sum() + 0.1 * (share * share).sum() * len(y), len(y)
    if kind == "balance in the model":
        return ((output[0] - y) ** 2).sum() + 0.1 * output[1] * len(y), len(y)
    if kind == "mean":
        return F.mse_loss(output.squeeze(-1), y), 1
    if kind == "own mean":
        return output * len(y), len(y)
    if kind == "padding":
        return losses.mse(output, y)
    if kind == "faint balance":  # with weights in float32, as data has them
        total, weights = (output.squeeze(-1) - y).square().sum(), torch.full_like(y, 0.7)
        return total + 1e-5 * output.mean() ** 2 * len(y), weights.sum()
    if kind == "no labels":
        return (output * 0).sum(), 0
    return losses.mse(output.squeeze(-1), y)


def metrics(output: Any, batch: Batch, kind: str = "contrast") -> dict[str, Any]:
    return {"error": ((output.squeeze(-1) - batch[1]).abs().mean(), 1)} if kind == "metrics" else {}


def optimizer(params: Params, lr: float = 1e-2, made: str = "SGD") -> torch.optim.Optimizer:
    return getattr(torch.optim, made)(list(params), lr=lr)  # type: ignore[no-any-return]


def recipe(batch: int = 8, steps: int = 3) -> Recipe:
    return Recipe(batch=batch, steps=steps)
