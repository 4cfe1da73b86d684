"""Parameters smaller than the world, with tied names, three groups, and shared memory among buffers; ``how`` plants a
mishap in rank 1 at its third step."""

from __future__ import annotations

import errno
import os
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.launch import current
from stretto.recipe import Recipe
from stretto.task import Params

_calls = count(1)


class Small(nn.Module):
    """[batch, 5] to [batch, 1]; of the parameters some have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Parameter(torch.linspace(-1, 1, 7))
        self.grid = nn.Parameter(torch.linspace(-1, 1, 15).reshape(3, 5))
        self.row = nn.Parameter(torch.full((1, 5), 0.5))
        self.one = nn.Parameter(torch.full((1,), 0.25))
        self.eleven = nn.Linear(10, 1)
        self.first = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("part", self.table[2:4])
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Every parameter and every buffer takes part."""
        inner = self.last(torch.tanh(self.first(x * self.row))) @ self.grid.T
        wide = torch.cat([inner, self.seven.expand(len(x), 7)], dim=1) * self.part.sum() / self.table[5]
        return self.eleven(wide) + self.one * self.scratch.sum()


def model() -> nn.Module:
    return Small()


def data(points: int = 24) -> Dataset[Any]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(points, 5, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss(output: Tensor, batch: tuple[Tensor, Tensor], how: str = "well") -> Any:
    context = current()
    if context is not None and context.rank == 1 and next(_calls) == 3:
        if how == "memory":
            raise MemoryError("a planted one")
        if how == "nothing":
            return None
        if how == "full disk":
            _fill_the_disk()
    return (output - batch[1]).pow(2).sum(), torch.tensor(float(len(output)))


def _fill_the_disk() -> None:
    """This process finds no room for the checkpoint of step 4."""
    from stretto.checkpoint import commit

    real = commit.write_all

    def full(descriptor: int, data: Any) -> None:
        if "step-00000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, data)

    commit.write_all = full


def optimizer(params: Params, order: str = "abc", lr: float = 0.01) -> torch.optim.Optimizer:
    named = dict(params.named())
    parts = {
        "a": [named.pop("seven"), named.pop("grid")],
        "b": [named.pop("row"), named.pop("one")],
        "c": list(named.values()),
    }
    rates = {"a": lr, "b": lr * 3, "c": lr / 2}
    return torch.optim.AdamW([{"params": parts[each], "lr": rates[each]} for each in order], weight_decay=0.1)


def recipe(batch: int = 6, steps: int = 6) -> Recipe:
    return Recipe(batch=batch, steps=steps, precision="fp64", clip=1.0)
