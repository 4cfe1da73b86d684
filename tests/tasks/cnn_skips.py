"""A small U-Net: residual blocks with BatchNorm, skips from early to late layers; each pixel of an image gets a class.

``norm="group"`` has GroupNorm instead, of ``groups`` groups, which microbatches take; ``drop``: of channels, at random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

Pair = tuple[Tensor, Tensor]
How = tuple[str, int, float]  # norm, groups, drop


class Squares(Dataset[Pair]):
    """Noise [1, side, side] with a bright square, and where the square is [side, side]."""

    def __init__(self, size: int, side: int, seed: int) -> None:
        self.size, self.side, self.seed = size, side, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Pair:
        drawn = torch.Generator().manual_seed(self.seed + index)
        image = torch.randn(1, self.side, self.side, generator=drawn)
        row, column = (int(place) for place in torch.randint(self.side - 2, (2,), generator=drawn))
        inside = torch.zeros(self.side, self.side, dtype=torch.long)
        inside[row : row + 3, column : column + 3] = 1
        return image + 2 * inside, inside


def normed(width: int, how: How) -> nn.Module:
    return nn.BatchNorm2d(width) if how[0] == "batch" else nn.GroupNorm(how[1], width)


class Residual(nn.Module):
    """[batch, before, h, w] to [batch, after, h, w], with the input added, changed in place at the end."""

    def __init__(self, before: int, after: int, how: How) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.first_norm = normed(after, how)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = normed(after, how)
        self.beside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout2d(how[2], inplace=True) if how[2] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found = self.act(self.drop(self.first_norm(self.first(x))))
        found = self.second_norm(self.second(found))
        found += self.beside(x)
        out: Tensor = self.act(found)
        return out


class UNet(nn.Module):
    """[batch, 1, side, side] to logits [batch, 2, side, side]."""

    def __init__(self, width: int, how: How) -> None:
        super().__init__()
        self.down = nn.ModuleList([Residual(1, width, how), Residual(width, 2 * width, how)])
        self.bottom = Residual(2 * width, 2 * width, how)
        self.up = nn.ModuleList([Residual(4 * width, width, how), Residual(2 * width, width, how)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        logits: Tensor = self.head(x)
        return logits


def data(size: int = 45, side: int = 8) -> dict[str, Dataset[Any]]:
    return {"train": Squares(size, side, 0), "val": Squares(13, side, 10_000)}


def model(width: int = 4, norm: str = "batch", groups: int = 4, drop: float = 0.0) -> nn.Module:
    return UNet(width, (norm, groups, drop))


def loss(output: Tensor, batch: Pair) -> tuple[Tensor, Tensor]:
    return losses.cross_entropy(output.movedim(1, -1), batch[1])


def metrics(output: Tensor, batch: Pair) -> dict[str, Any]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), batch[1].numel())}


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=3 * lr, momentum=0.9)
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0, eval_every: int = 0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=23, eval_every=eval_every)
