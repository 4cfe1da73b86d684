"""Samples that draw from every generator, so that a lost, repeated or differently drawn one changes the loss.

``how`` plants what a dataset can do to its run; it strikes at sample 5.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.launch import current
from stretto.recipe import Recipe


class Stream(Dataset[dict[str, Any]]):
    """``length`` samples; each is told by its id and by three drawn numbers."""

    def __init__(self, length: int, how: str, pause: float, pids: str) -> None:
        self.length, self.how, self.pause, self.pids = length, how, pause, pids
        self.fetched = 0

    def __len__(self) -> int:
        return self.length + (self.how == "grows" and self.fetched > 4)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched += 1
        if self.pids:
            Path(self.pids, str(os.getpid())).touch()
        time.sleep(self.pause)
        if index == 5 and self.how == "raise":
            raise RuntimeError("connection reset by a planted fault")
        if index == 5 and self.how in ("SIGKILL", "SIGBUS"):
            os.kill(os.getpid(), getattr(signal, self.how))
        drawn = [float(torch.rand(())), float(numpy.random.rand()), random.random()]
        return {"x": torch.tensor([index / 10, *drawn], dtype=torch.float64), "id": index, "text": f"sample {index}"}


def model() -> nn.Module:
    return nn.Linear(4, 1)


def data(
    length: int = 16, val: int = 0, how: str = "well", pause: float = 0.0, pids: str = ""
) -> dict[str, Dataset[dict[str, Any]]]:
    context = current()
    if how == "by rank" and context is not None:
        length += context.rank
    splits: dict[str, Dataset[dict[str, Any]]] = {"train": Stream(length, how, pause, pids)}
    return {**splits, "val": Stream(val, "well", 0.0, "")} if val or how == "empty" else splits


def loss(output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert batch["text"] == [f"sample {index}" for index in batch["id"].tolist()]
    return (output.squeeze(-1) - batch["x"].sum(-1)).pow(2).sum(), torch.tensor(float(len(output)))


def metrics(output: Tensor, batch: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    count = torch.tensor(float(len(output)))
    return {"index": (batch["id"].sum(), count), "one": (torch.tensor(len(output)), count)}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def inputs(batch: dict[str, Any]) -> Tensor:
    return batch["x"]  # type: ignore[no-any-return]


def recipe(batch: int = 2, steps: int = 24) -> Recipe:
    return Recipe(batch=batch, steps=steps, precision="fp64")
