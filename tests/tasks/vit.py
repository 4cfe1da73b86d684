"""A small vision transformer of torch's own encoder layers: patches, a class token, learnt positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

Pair = tuple[Tensor, Tensor]


class Blobs(Dataset[Pair]):
    """Noise [1, side, side] with a bright quarter, and which quarter it is."""

    def __init__(self, size: int, side: int, seed: int) -> None:
        self.size, self.side, self.seed = size, side, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Pair:
        drawn = torch.Generator().manual_seed(self.seed + index)
        image, half = torch.randn(1, self.side, self.side, generator=drawn), self.side // 2
        quarter = torch.randint(4, (), generator=drawn)
        row, column = half * int(quarter // 2), half * int(quarter % 2)
        image[:, row : row + half, column : column + half] += 1
        return image, quarter


class ViT(nn.Module):
    """[batch, 1, side, side] to [batch, 4]."""

    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(patches), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return logits


def data(size: int = 45, side: int = 8) -> dict[str, Dataset[Any]]:
    return {"train": Blobs(size, side, 0), "val": Blobs(13, side, 10_000)}


def model(side: int = 8, patch: int = 2, width: int = 16, depth: int = 2, heads: int = 4) -> nn.Module:
    return ViT(side, patch, width, depth, heads)


def loss(output: Tensor, batch: Pair) -> tuple[Tensor, Tensor]:
    return losses.cross_entropy(output, batch[1])


def metrics(output: Tensor, batch: Pair) -> dict[str, Any]:
    return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), len(output))}


def optimizer(params: Params, lr: float = 3e-3, kind: str = "adamw") -> torch.optim.Optimizer:
    named = list(params.named())
    groups = [
        {"name": "matrices", "params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"name": "vectors", "params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=10 * lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=22)
