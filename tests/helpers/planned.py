"""A small model on a few devices, for tests of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.planner.constants import Constants
from stretto.planner.described import Described
from stretto.planner.hardware import Machines, find_device
from stretto.planner.score import Scorer
from stretto.planner.software import Software
from stretto.planner.space import Space
from stretto.planner.transformer import Transformer

GPT = Transformer(24, 2048, 16, 16, 8192, 50304)


def scorer_of(
    model: Transformer = GPT, count: int = 16, batch: int = 64, memory: float = 80e9, **system: Any
) -> Scorer:
    device = replace(find_device("H100"), memory_bytes=memory)
    space = Space(Described(model, 2048), Machines(device, count, min(8, count)), batch, replace(Software(), **system))
    return Scorer(space, Constants())
