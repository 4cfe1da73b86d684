"""A loss of two terms with denominators of their own: words that count, and samples that have a second target."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

WORDS = 7


class TwoHeads(nn.Module):
    """[batch, tokens, 4] to word logits [batch, tokens, words] and one number a sample [batch]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.words = nn.Linear(width, WORDS)
        self.number = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.words(hidden), self.number(hidden.mean(1)).squeeze(-1)


class Texts(Dataset[dict[str, Tensor]]):
    """Of every third sample no word counts; only those from ``second_from`` on have a second target."""

    def __init__(self, length: int, second_from: int) -> None:
        self.length, self.second_from = length, second_from

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        labels = torch.randint(WORDS, (5,), generator=drawn)
        labels[index % 3 + 2 if index % 3 else 0 :] = -100
        has = torch.tensor(float(index >= self.second_from))
        x = torch.randn(5, 4, generator=drawn)
        return {"x": x, "labels": labels, "target": x.sum(), "has": has}


def model(width: int = 6) -> nn.Module:
    return TwoHeads(width)


def data(length: int = 25, second_from: int = 12) -> Texts:
    return Texts(length, second_from)


def inputs(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"]


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    logits, number = output
    known = weights(batch)
    words = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    gap = ((number - batch["target"].to(number.dtype)).square() * batch["has"].to(number.dtype)).sum()
    return {"words": (words, torch.tensor(known["words"])), "number": (gap, torch.tensor(known["number"]))}


def weights(batch: dict[str, Tensor]) -> dict[str, float]:
    return {"words": float((batch["labels"] != -100).sum()), "number": float(batch["has"].sum())}


def optimizer(params: Params, kind: str = "adamw") -> Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(params, lr=1e-2)
    return torch.optim.SGD(params, lr=5e-2, momentum=0.9, weight_decay=0.1)


def recipe(batch: int = 7, steps: int = 6) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=0.5)
