"""Faults of bf16 and fp16: masters, sums and the loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch


def no_masters(rank: int) -> None:
    """What is trained is the copy of low precision: each update is rounded to it."""
    from stretto.parallel import BoundOptimizer

    honest = BoundOptimizer.step

    def step(self: Any, gradients: Mapping[str, Any]) -> None:
        honest(self, gradients)
        with torch.no_grad():
            for place in self._places.values():
                place.local.copy_(place.local.to(place.compute.dtype))

    BoundOptimizer.step = step  # type: ignore[method-assign]


def sums_in_low_precision(rank: int) -> None:
    """The gradients of microbatches are added up in the type that they come in."""
    from stretto.sync.buckets import Kept

    honest = Kept.arrived

    def arrived(self: Any, name: str) -> None:
        honest(self, name)
        self._views[name].copy_(self._views[name].to(self._parts[name].compute.dtype))

    Kept.arrived = arrived  # type: ignore[method-assign]


def overflow_decided_alone(rank: int) -> None:
    """A rank whose own shards are finite takes the step that the others leave out (fp16, zero=3)."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        decision = honest(self, step, terms)
        own = float(self.on.sync.square_sum())
        return dataclasses.replace(decision, square_sum=own) if math.isfinite(own) else decision

    Stepper._vote = vote  # type: ignore[method-assign]


def scale_halved_alone(rank: int) -> None:
    """After an overflow a rank whose own shards are finite keeps its loss scale (fp16, zero=3)."""
    from stretto.precision import LossScale
    from stretto.step import Stepper

    vote, after = Stepper._vote, LossScale.after
    own = [True]

    def look(self: Any, step: int, terms: Any) -> Any:
        own[:] = [math.isfinite(float(self.on.sync.square_sum()))]
        return vote(self, step, terms)

    def after_own(self: Any, finite: bool) -> LossScale:
        return after(self, own[0])

    Stepper._vote = look  # type: ignore[method-assign]
    LossScale.after = after_own  # type: ignore[method-assign]


def clipped_while_scaled(rank: int) -> None:
    """The norm of the *scaled* gradient decides whether it is clipped (fp16)."""
    from stretto.step import Stepper
    from stretto.sync.exact import ExactSum

    find, scale = Stepper._factor, ExactSum.scale
    known: dict[str, float] = {}

    def note(self: Any, decision: Any) -> float:
        right = find(self, decision)
        known.update(right=right, norm=math.sqrt(decision.square_sum) * right * self.scale.scale)
        known.update(clip=self.task.recipe.clip)
        return right

    def scale_wrongly(self: Any, factor: float) -> None:
        scale(self, known["right"] * min(1.0, known["clip"] / (known["norm"] + 1e-6)))

    Stepper._factor = note  # type: ignore[method-assign]
    ExactSum.scale = scale_wrongly  # type: ignore[method-assign]
