"""How fast this machine multiplies matrices and moves memory, with all its workers at it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from stretto.launch import WorkerContext

SIDES: Final = (64, 256, 1024)
PRECISIONS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}.items()
MOVED: Final = 2**27  # bytes
SECONDS: Final = 0.15  # of one figure


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A worker's entry: flop/s by precision and side of a square matrix, bytes/s read and written."""
    matrix = {name: {str(side): _matrix_rate(side, dtype) for side in SIDES} for name, dtype in PRECISIONS}
    source = torch.zeros(MOVED // 4)
    target = torch.empty_like(source)
    return {"matrix_flops": matrix, "memory_bytes_per_second": 2 * MOVED / _seconds(lambda: target.copy_(source))}


def _matrix_rate(side: int, dtype: torch.dtype) -> float:
    one = torch.rand(side, side).to(dtype)
    return 2 * side**3 / _seconds(lambda: one @ one)


def _seconds(action: Callable[[], object]) -> float:
    """The median of as many as fit."""
    action()
    took: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(took) < 3:
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return statistics.median(took)
