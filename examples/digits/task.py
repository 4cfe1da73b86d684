"""Handwritten digits, 8 by 8 pixels (scikit-learn's bundled set), and a small convolutional network.

Small enough to finish while you watch, and a real test of BatchNorm: its means and variances must be those
of the whole global batch, however that batch is cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.recipe import Recipe
from stretto.task import Params


def data(held_out: float = 0.2) -> dict[str, Dataset[Any]]:
    """1797 images x [1, 8, 8] in 0..1 with labels y []; each digit keeps its share in the held-out part."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=held_out, stratify=labels, random_state=0)
    x_train, x_val = (torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16 for x in parts[:2])
    y_train, y_val = (torch.from_numpy(y).long() for y in parts[2:])
    return {"train": TensorDataset(x_train, y_train), "val": TensorDataset(x_val, y_val)}


def model(width: int = 32) -> nn.Module:
    def convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
        # BatchNorm has a bias of its own, so the convolution needs none.
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *convolution(1, width),
        *convolution(width, width),
        nn.MaxPool2d(2),  # [width, 4, 4]
        *convolution(width, 2 * width),
        nn.AdaptiveAvgPool2d(2),  # [2 * width, 2, 2]
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(the cross entropies of all images, summed; the number of images)."""
    target = batch[1]
    return F.cross_entropy(output, target, reduction="sum"), torch.tensor(len(target), device=output.device)


def metrics(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (sum, count) again: the share of right answers is exact however the images are cut."""
    target = batch[1]
    right = (output.argmax(dim=1) == target).sum()
    return {"accuracy": (right, torch.tensor(len(target), device=output.device))}


def optimizer(
    params: Params, lr: float = 3e-3, weight_decay: float = 0.01, kind: str = "adamw"
) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=steps + 1
    )


def recipe(batch: int = 64, steps: int = 250) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0, eval_every=max(1, steps // 5), seed=1)
