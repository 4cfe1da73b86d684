"""A weight that counts the steps, so that a test can say what each evaluation gives: ``values`` by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.launch import current
from stretto.recipe import Recipe


class Count(nn.Module):
    """x [batch, 1] of ones to [batch]: the number of steps taken."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.steps


def model() -> nn.Module:
    return Count()


def data(held_out: bool = True) -> dict[str, Dataset[Any]]:
    ones = TensorDataset(torch.ones(6, 1), torch.ones(6))
    return {"train": ones, **({"val": TensorDataset(torch.ones(5, 1), torch.ones(5))} if held_out else {})}


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return -output.sum(), batch[1].sum()  # gradient -1, whatever the weight


def metrics(output: Tensor, batch: list[Tensor]) -> dict[str, Any]:
    return {"steps": (output.sum(), batch[1].sum())}


def summarize(totals: dict[str, Any], values: tuple = (0.0, 1.0), by_rank: float = 0.0) -> dict[str, float]:  # type: ignore[type-arg]
    """``by_rank`` makes each rank give another number, as a metric that is not reduced would."""
    total, weight = totals["steps"]
    context = current()
    rank = 0 if context is None else context.rank
    return {"score": float(values[min(round(total / weight), len(values) - 1)]) + by_rank * rank}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def recipe(batch: int = 3, steps: int = 6, best: str = "highest score") -> Recipe:
    return Recipe(batch=batch, steps=steps, best=best, eval_every=1, keep=1, precision="fp64")
