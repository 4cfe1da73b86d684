"""An LSTM over sequences of varied length, padded, each token with a weight of its own (0 where padded)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]


class Sequences(Dataset[Batch]):
    """Each sequence counts up modulo ``vocab`` by its own step; lengths 1..length, weights 0.25..1.25."""

    def __init__(self, size: int, length: int, vocab: int, seed: int) -> None:
        self.size, self.length, self.vocab, self.seed = size, length, vocab, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(self.seed + index)
        first, step = torch.randint(self.vocab, (2,), generator=drawn)
        num_tokens = int(torch.randint(1, self.length + 1, (), generator=drawn))
        tokens = (first + step * torch.arange(self.length + 1)) % self.vocab
        weights = torch.rand(self.length, generator=drawn) + 0.25
        weights[num_tokens:] = 0
        return {"tokens": tokens[:-1], "next": tokens[1:], "weights": weights}


class Tagger(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocab]."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def data(size: int = 61, length: int = 9, vocab: int = 13) -> dict[str, Dataset[Any]]:
    return {"train": Sequences(size, length, vocab, 0), "val": Sequences(17, length, vocab, 10_000)}


def model(vocab: int = 13, width: int = 16, layers: int = 2) -> nn.Module:
    return Tagger(vocab, width, layers)


def inputs(batch: Batch) -> Tensor:
    return batch["tokens"]


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    weights = batch["weights"].to(output.dtype)
    each = F.cross_entropy(output.flatten(0, 1), batch["next"].flatten(), reduction="none").view_as(weights)
    return (each * weights).sum(), weights.sum(dtype=torch.float64)


def metrics(output: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    valid = batch["weights"] > 0
    return {"accuracy": (((output.argmax(-1) == batch["next"]) & valid).sum(), valid.sum())}


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=3)
