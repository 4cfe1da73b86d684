"""Next words by a small network, and losses of its logits as people write them; ``kind`` chooses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

VOCAB, WIDTH, LENGTH, IGNORED, PADDING = 13, 8, 5, 4, 2
Batch = dict[str, Any]


class Words(Dataset[Batch]):
    """Walks: words [length], next [length]."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(index)
        walk = torch.randint(1, 6, (LENGTH + 1,), generator=drawn).cumsum(0) % VOCAB
        named = {"name": f"walk {index}"} if self.kind == "named" else {}
        return {"words": walk[:-1], "next": walk[1:], **named}


def data(size: int = 31, kind: str = "gather") -> dict[str, Dataset[Any]]:
    return {"train": Words(size, kind), "val": Words(9, kind)}


class Network(nn.Module):
    """words [batch, length] -> logits [batch, length, vocab]."""

    def __init__(self, tied: bool, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=padding)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(self.norm(x))


def model(tied: bool = False, padding: int = PADDING) -> nn.Module:
    return Network(tied, None if padding < 0 else padding)


def inputs(batch: Batch) -> Tensor:
    return batch["words"]


def _each(logits: Tensor, target: Tensor, kind: str) -> Tensor:
    """A loss for each word."""
    picked = target.unsqueeze(-1)
    flat, named = logits.flatten(0, 1), target.flatten()
    weights = torch.linspace(0.5, 2, VOCAB, dtype=logits.dtype)
    if kind in ("gather", "named"):
        return -F.log_softmax(logits, -1).gather(-1, picked)
    if kind == "along":
        return -torch.take_along_dim(logits.softmax(-1).log(), picked, -1)
    if kind == "logsumexp":
        return logits.logsumexp(-1) - logits.gather(-1, picked).squeeze(-1)
    if kind == "indexed":
        return -F.log_softmax(flat, -1)[torch.arange(len(named)), named]
    if kind == "nll":
        return F.nll_loss(F.log_softmax(flat, -1), named, weights, reduction="none", ignore_index=IGNORED)
    if kind == "weighted":
        return F.cross_entropy(flat, named, weights, reduction="none", label_smoothing=0.1, ignore_index=IGNORED)
    if kind == "smooth":
        return F.cross_entropy(logits.transpose(1, 2), target, reduction="none", label_smoothing=0.2)
    if kind == "largest":
        margin = logits.amax(-1, keepdim=True) - logits.gather(-1, picked)
        return margin.squeeze(-1) + 0.1 * (logits - logits.mean(-1, keepdim=True)).square().sum(-1)
    if kind == "mean":  # of classes too
        return F.cross_entropy(flat, named, reduction="none") + 0.01 * flat.square().mean(-1)
    if kind == "entropy":
        chances = logits.softmax(-1)
        return F.cross_entropy(flat, named, reduction="none").view(target.shape) + (chances * chances.log()).sum(-1)
    return F.cross_entropy(flat, named, reduction="none")


def loss(output: Tensor, batch: Batch, kind: str = "gather") -> Any:
    target = batch["next"]
    number = torch.tensor(target.numel())
    if kind == "masked":  # a shape that depends on the numbers
        valid = target != IGNORED
        return F.cross_entropy(output[valid], target[valid], reduction="sum"), number
    if kind == "averaged":  # a mean of one microbatch, weighted again; without its ignored words
        valid = (target != IGNORED).sum()
        mean = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, label_smoothing=0.1)
        return mean * valid, number
    if kind == "terms":
        entropy = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)
        flatness = output.logsumexp(-1).square()
        return {"entropy": (entropy, (target != IGNORED).sum()), "flatness": (0.1 * flatness.sum(), number)}
    if kind == "reversed":  # a backward of its own isn't in a trace
        output = _Halved.apply(output)
    return _each(output, target, kind).sum(), number


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def weights(batch: Batch, kind: str = "gather") -> dict[str, float]:
    target = batch["next"]
    if kind == "terms":
        return {"entropy": float((target != IGNORED).sum()), "flatness": float(target.numel())}
    return {"loss": float(target.numel())}


def metrics(output: Tensor, batch: Batch) -> dict[str, Any]:
    right = output.argmax(-1) == batch["next"]
    return {"accuracy": (right.sum(), torch.tensor(right.numel())), "first": output[:, 0, :]}


def summarize(totals: dict[str, Any]) -> dict[str, float]:
    right, number = totals["accuracy"]
    return {"accuracy": float(right) / float(number)}


def optimizer(params: Params, lr: float = 0.02, step: str = "adamw") -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr) if step == "adamw" else torch.optim.SGD(params, lr=lr, momentum=0.9)


def recipe(batch: int = 7, steps: int = 4) -> Recipe:
    return Recipe(batch=batch, steps=steps, seed=3, clip=1.0, unit="words")
