"""A model, data, optimizer and recipe drawn from ``seed``: odd shapes, and parts that few models have together."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

WORDS = 9
KINDS = ("linear", "bare", "again", "frozen", "row", "gain", "norm", "nested", "seldom", "turn", "wide", "unused")


class Again(nn.Module):
    """Uses another layer once more: a tied weight, in a block of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.layer(x)


class Scaled(nn.Module):
    """x times a parameter of a given shape, one row or no dimension at all; holds one without rows beside it."""

    def __init__(self, shape: tuple[int, ...], frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5, requires_grad=not frozen)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Turned(nn.Module):
    """Pairs of features, turned and stretched by complex parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.turn.real.dtype)
        return torch.view_as_real(torch.complex(wide, 0.5 * wide) * self.turn).sum(-1).to(x.dtype)


class Drawn(nn.Module):
    """x [batch, 3] and words [batch] to [batch]."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        width = draw.choice([1, 2, 3, 5, 7])
        self.sparse = draw.random() < 0.3
        self.table = nn.Embedding(WORDS, width, sparse=self.sparse)
        self.enter = nn.Linear(3, width)
        kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 6))]
        self.blocks = nn.ModuleList()
        for kind in kinds:
            if kind not in ("seldom", "unused"):
                self.blocks.append(self._block(kind, width, draw))
        self.seldom = nn.Parameter(torch.rand(width)) if "seldom" in kinds else None
        self.unused = nn.Linear(2, 3) if "unused" in kinds else None
        self.leave = nn.Linear(width, 1, bias=draw.random() < 0.5)
        if draw.random() < 0.3:
            self.enter.weight.requires_grad_(False)
        if draw.random() < 0.3:
            self.leave.double()

    def _block(self, kind: str, width: int, draw: Random) -> nn.Module:
        if kind == "again":
            return Again(self._tied(width))
        made = {
            "linear": lambda: nn.Linear(width, width),
            "bare": lambda: nn.Linear(width, width, bias=False),
            "frozen": lambda: nn.Linear(width, width).requires_grad_(False),
            "row": lambda: Scaled((1, width), draw.random() < 0.3),
            "gain": lambda: Scaled((), draw.random() < 0.3),
            "norm": lambda: nn.LayerNorm(width),
            "nested": lambda: nn.Sequential(nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width)),
            "turn": lambda: Turned(width),
            "wide": lambda: nn.Sequential(nn.Linear(width, 40), nn.Linear(40, width, dtype=torch.bfloat16)),
        }
        return made[kind]()

    def _tied(self, width: int) -> nn.Module:
        """The one layer that all blocks of this kind share."""
        found = [block.layer for block in self.blocks if isinstance(block, Again)]
        return found[0] if found else nn.Linear(width, width)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x) + self.table(words))
        for block in self.blocks:
            h = torch.tanh(block(h))
        out = self.leave(h).squeeze(-1)
        rare = words == 1
        return out + torch.where(rare, h @ self.seldom, 0.0) if self.seldom is not None and rare.any() else out


class Samples(Dataset[tuple[Tensor, ...]]):
    """x, words, target and weight; some weights are 0."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(3, generator=drawn, dtype=torch.float64)
        word = torch.randint(WORDS, (), generator=drawn)
        return x, word, x.sum().sin(), torch.tensor(float(index % 5), dtype=torch.float64)


def model(seed: int = 0) -> nn.Module:
    return Drawn(Random(seed))


def data(seed: int = 0) -> Samples:
    return Samples(Random(seed + 1).choice([3, 7, 11, 20]))


def inputs(batch: list[Tensor]) -> tuple[Tensor, ...]:
    return batch[0], batch[1]


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return (batch[3] * (output - batch[2]).square()).sum(), batch[3].sum()


def optimizer(params: Params, seed: int = 0) -> Optimizer:
    """Two groups. Sparse gradients leave few optimizers, and so do complex parameters."""
    draw = Random(seed + 2)
    sparse = any(name == "table.weight" for name, _ in params.named()) and Drawn(Random(seed)).sparse
    some = [p for p in params if draw.random() < 0.5]
    chosen = {id(p) for p in some}
    groups = [{"params": [p for p in params if id(p) not in chosen]}, {"params": some, "lr": 0.003}]
    groups = [group for group in groups if group["params"]]
    kinds = ("SGD", "Adagrad") if sparse else ("SGD", "AdamW", "Adam", "RMSprop", "Adagrad")
    kind = draw.choice(kinds)
    more = {"momentum": 0.9, "weight_decay": 0.1} if kind == "SGD" and not sparse else {}
    made: Optimizer = getattr(torch.optim, kind)(groups, lr=0.02, **more)
    return made


def recipe(seed: int = 0) -> Recipe:
    draw = Random(seed + 3)
    return Recipe(batch=draw.choice([1, 2, 3, 5, 8]), steps=4, clip=draw.choice([None, 0.2]), precision="fp64")
