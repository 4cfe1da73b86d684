"""Two texts and numbers in, a dataclass out; one encoder is called for both texts, and two modules have one weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Any]


class Pairs(Dataset[Batch]):
    """Two texts [length], numbers [3], whether the texts begin alike, and what the numbers add up to."""

    def __init__(self, size: int, length: int, vocab: int, seed: int) -> None:
        self.size, self.length, self.vocab, self.seed = size, length, vocab, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(self.seed + index)
        left, right = torch.randint(self.vocab, (2, self.length), generator=drawn)
        numbers = torch.randn(3, generator=drawn)
        if index % 2:
            right = torch.cat([left[:2], right[2:]])
        return {
            "texts": {"left": left, "right": right},
            "numbers": numbers,
            "alike": float(torch.equal(left[:2], right[:2])),
            "total": numbers.sum(),
        }


@dataclass
class Answer:
    """alike [batch], total [batch], next [batch, vocab] and, by name, the two codes [batch, width]."""

    alike: Tensor
    total: Tensor
    next: tuple[Tensor, ...]
    codes: dict[str, Tensor]


class Encoder(nn.Module):
    """[batch, length] to [batch, width]."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.tanh(self.mix(self.embedding(tokens))).mean(1))
        return found


class Multi(nn.Module):
    """Everything by keyword; ``numbers`` may be left out."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.encoder = Encoder(vocab, width)
        self.numbers = nn.Sequential(nn.Linear(3, width), nn.GELU())
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.encoder.embedding.weight  # tied across two modules
        self.total = nn.Linear(width, 1)
        self.sharpness = nn.Parameter(torch.tensor(0.5))

    def forward(self, *, left: Tensor, right: Tensor, numbers: Tensor | None = None) -> Answer:
        codes = {"left": self.encoder(left), "right": self.encoder(right)}
        extra = 0.0 if numbers is None else self.numbers(numbers)
        return Answer(
            alike=self.sharpness * (codes["left"] * codes["right"]).sum(-1),
            total=self.total(codes["left"] + extra).squeeze(-1),
            next=(self.head(codes["left"]), self.head(codes["right"])),
            codes=codes,
        )


def data(size: int = 45, length: int = 5, vocab: int = 12) -> dict[str, Dataset[Any]]:
    return {"train": Pairs(size, length, vocab, 0), "val": Pairs(13, length, vocab, 10_000)}


def model(vocab: int = 12, width: int = 16) -> nn.Module:
    return Multi(vocab, width)


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {**batch["texts"], "numbers": batch["numbers"]}


def loss(output: Answer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Three losses of one sample, added; a sample weighs one and a half where the texts begin alike."""
    alike = batch["alike"].to(output.alike.dtype)
    weight = 1 + 0.5 * alike
    each = F.binary_cross_entropy_with_logits(output.alike, alike, reduction="none")
    each = each + (output.total - batch["total"].to(output.total.dtype)) ** 2
    for logits, name in zip(output.next, ("left", "right"), strict=True):
        each = each + F.cross_entropy(logits, batch["texts"][name][:, -1], reduction="none")
    return (each * weight).sum(), weight.sum()


def metrics(output: Answer, batch: Batch) -> dict[str, Any]:
    return {"alike": ((output.alike > 0).eq(batch["alike"] > 0).sum(), len(output.alike)), "total": output.total}


def summarize(totals: dict[str, Any]) -> dict[str, float]:
    right, number = totals["alike"]
    return {"alike": right / number, "median_total": float(totals["total"].median())}


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    named = list(params.named())
    groups = [
        {"name": "matrices", "params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"name": "the rest", "params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=3 * lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=13)
