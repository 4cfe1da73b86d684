"""A curve in whose dataset or loss rank 1 gets stuck at its third microbatch, as ``how`` says."""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.launch import current
from stretto.losses import mse
from stretto.recipe import Recipe

_calls = count(1)


class Points(Dataset[Any]):
    """[64 samples] of a curve."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        context = current()
        if self.how == "loader" and context is not None and context.rank == 1 and next(_calls) > 4:
            time.sleep(60)
        x = torch.tensor([index / 10])
        return x, torch.sin(2 * x)


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


def data(how: str = "well") -> Dataset[Any]:
    return Points(how)


def loss(output: Tensor, batch: tuple[Tensor, Tensor], how: str = "well") -> tuple[Tensor, Tensor]:
    context = current()
    if context is not None and context.rank == 1 and how in PLANTED and next(_calls) == 3:
        PLANTED[how]()
    return mse(output, batch[1])


def _raise() -> None:
    raise RuntimeError("a planted fault")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave() -> None:
    os._exit(7)


def _block() -> None:
    """Holds the interpreter's lock, as a careless extension does."""
    import ctypes

    ctypes.PyDLL(None).sleep(60)


def _dawdle() -> None:
    time.sleep(1.2)


PLANTED = {"slow": _dawdle, "raise": _raise, "stop": _stop, "leave": _leave, "block": _block}


def optimizer(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def recipe(batch: int = 6, steps: int = 6) -> Recipe:
    return Recipe(batch=batch, steps=steps)
