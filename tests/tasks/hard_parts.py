"""Parameters that break other systems, side by side: a sparse table, a module in two blocks that are sharded apart,
complex numbers, whole numbers, no elements, no dimensions, a frozen one, one that nobody uses, one that few samples
use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params


class Block(nn.Module):
    """A residual layer; ``shared`` stands in two of them."""

    def __init__(self, width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.shared(self.own(x)))


class Hard(nn.Module):
    """[batch, 3] word numbers to [batch]."""

    def __init__(self, words: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, sparse=sparse)
        shared = nn.Linear(width, width)
        plain = nn.Sequential(nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, shared), plain, Block(width, shared)])
        self.turn = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.lookup = nn.Parameter(torch.arange(words), requires_grad=False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.seldom = nn.Parameter(torch.full((width,), 0.2))
        self.register_buffer("offset", torch.tensor(0.1, dtype=torch.float64), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(self.lookup[words]).mean(1)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        spun = torch.view_as_real(torch.complex(x.float(), torch.zeros_like(x.float())) * self.turn).sum(-1)
        out = (spun.to(x.dtype) * self.gain + self.offset.to(x.dtype)).sum(-1)
        rare = words[:, 0] == 1
        return out + torch.where(rare, x @ self.seldom, 0.0) if rare.any() else out


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """``length`` triples of word numbers, and a target."""

    def __init__(self, length: int, words: int) -> None:
        self.length, self.words = length, words

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        words = torch.randint(self.words, (3,), generator=drawn)
        return words, words.double().sum().sin()


def model(words: int = 40, width: int = 6, sparse: bool = True) -> nn.Module:
    return Hard(words, width, sparse)


def data(length: int = 30, words: int = 40) -> Sentences:
    return Sentences(length, words)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (output - batch[1].to(output.dtype)).square().sum(), torch.tensor(len(batch[1]))


def optimizer(params: Params, kind: str = "adagrad") -> Optimizer:
    trained = [p for p in params if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr": 0.05, "name": "matrices"},
        {"params": [p for p in trained if p.ndim <= 1 and not p.is_complex()], "lr": 0.02, "name": "vectors"},
        {"params": [p for p in trained if p.is_complex()], "lr": 0.01, "name": "turns"},
    ]
    return torch.optim.Adagrad(groups) if kind == "adagrad" else torch.optim.SGD(groups, lr=0.01)


def recipe(batch: int = 7, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=0.5)
