"""Two dense towers of different depth that meet: numbers of a person and of a thing, and how well they match."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.layout import Layout
from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]


class Matches(Dataset[Batch]):
    """person [6], thing [4], whether they match, and how much that counts."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(self.seed + index)
        person, thing = torch.randn(6, generator=drawn), torch.randn(4, generator=drawn)
        match = (person[:4] * thing).sum() > 0
        counts = 0.5 + torch.rand((), generator=drawn)
        return {"person": person, "thing": thing, "match": match.float(), "counts": counts}


def tower(before: int, width: int, after: int, depth: int) -> nn.Sequential:
    widths = [before, *[width] * depth]
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, after))


class Towers(nn.Module):
    """A dict with the logits [batch] and both codes [batch, code]; and None, as it explains nothing."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.person = tower(6, width, code, 3)
        self.thing = tower(4, width, code, 1)
        self.temperature = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("centre", torch.tensor(0.1))

    def forward(self, person: Tensor, *, thing: Tensor) -> dict[str, Any]:
        one, other = F.normalize(self.person(person), dim=-1), F.normalize(self.thing(thing), dim=-1)
        logits = (one * other).sum(-1) * self.temperature.exp() - self.centre
        return {"logits": logits, "codes": (one, other), "why": None}


def data(size: int = 45) -> dict[str, Dataset[Any]]:
    return {"train": Matches(size, 0), "val": Matches(13, 10_000)}


def model(width: int = 12, code: int = 6) -> nn.Module:
    return Towers(width, code)


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {"person": batch["person"], "thing": batch["thing"]}


def loss(output: dict[str, Any], batch: Batch) -> tuple[Tensor, Tensor]:
    logits = output["logits"]
    each = F.binary_cross_entropy_with_logits(logits, batch["match"].to(logits.dtype), reduction="none")
    counts = batch["counts"].to(logits.dtype)
    return (each * counts).sum(), counts.sum()


def metrics(output: dict[str, Any], batch: Batch) -> dict[str, Any]:
    return {"accuracy": ((output["logits"] > 0).eq(batch["match"] > 0).sum(), len(batch["match"]))}


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=3 * lr, momentum=0.9)
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=24)


def layout(cuts: str = "", towers: str = "", tensor: str = "") -> Layout:
    """``cuts``: modules, as ``thing.0+thing.2``; ``towers``: likewise, one for each rank; ``tensor``: name=way."""
    wishes = dict(one.split("=") for one in tensor.split("+") if one)
    return Layout(wishes, [one for one in cuts.split("+") if one], [[one] for one in towers.split("+") if one])
