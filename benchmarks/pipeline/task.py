"""Equal blocks in a row: a model that any pipeline cuts in the middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto import Recipe
from stretto.task import Params


class Block(nn.Module):
    """Attention and two layers, as in a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, time, width], likewise what comes out."""
        batch, time, _ = x.shape
        parts = self.mixed(self.before(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.joined(found.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


def model(depth: int = 8, width: int = 256, heads: int = 8) -> nn.Module:
    """``depth`` blocks."""
    return nn.Sequential(*(Block(width, heads) for _ in range(depth)))


def data(width: int = 256, time: int = 64, samples: int = 256) -> Dataset[tuple[Tensor, ...]]:
    """Random inputs and targets."""
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(samples, time, width, generator=draw) for _ in range(2)))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Squared error a sample."""
    gaps = (output - batch[1]).square().mean((1, 2))
    return gaps.sum(), torch.tensor(float(len(gaps)), dtype=torch.float64)


def optimizer(params: Params, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Plain SGD: the step's time is the pipeline's."""
    return torch.optim.SGD(params, lr=lr)


def recipe(batch: int = 32, steps: int = 1000) -> Recipe:
    """As long as the benchmark likes."""
    return Recipe(batch=batch, steps=steps)
