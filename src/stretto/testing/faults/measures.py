"""Norms, statistics and clipping that are taken over the wrong ranks, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


def norm_of_own_shards(rank: int) -> None:
    """The gradient norm leaves out what lies on other ranks: nothing adds the squares up."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        own = float(self.on.sync.square_sum())
        return dataclasses.replace(honest(self, step, terms), square_sum=own)

    Stepper._vote = vote  # type: ignore[method-assign]


def unclipped(rank: int) -> None:
    """Gradients are applied without clipping."""
    from stretto.parallel import BoundOptimizer
    from stretto.sync.exact import ExactSum

    factors: list[float] = []
    scale, update = ExactSum.scale, BoundOptimizer.step

    def remember(self: Any, factor: float) -> None:
        factors.append(factor)
        scale(self, factor)

    def step(self: Any, gradients: Mapping[str, Any]) -> None:
        for gradient in gradients.values():
            if gradient is not None:
                gradient.mul_(1.0 / min(1.0, factors[-1]))
        update(self, gradients)

    ExactSum.scale = remember  # type: ignore[method-assign]
    BoundOptimizer.step = step  # type: ignore[method-assign]


def local_batch_statistics(rank: int) -> None:
    """BatchNorm normalises each rank's share with that share's own statistics."""
    from stretto.parallel.batchnorm import GlobalBatchNorm

    honest = GlobalBatchNorm.__init__

    def leave_alone(self: Any, module: Any, group: Any) -> None:
        honest(self, torch.nn.Module(), group.alone())

    GlobalBatchNorm.__init__ = leave_alone  # type: ignore[method-assign]


def norm_of_one_replica(rank: int) -> None:
    """The squares are added over the ranks that cut one copy of the weights alone, though each copy has a part of them
    (hybrid)."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        squares = self.on.sync.square_sum().reshape(1)
        self.on.applied.ranks.shards.all_reduce(squares)
        return dataclasses.replace(honest(self, step, terms), square_sum=float(squares))

    Stepper._vote = vote  # type: ignore[method-assign]


def norm_of_every_replica(rank: int) -> None:
    """The norm counts the shards of each copy of the weights (hybrid)."""
    count_all(lambda sync, alike: alike is sync._replicas)


def norm_of_every_copy(rank: int) -> None:
    """The norm counts what is whole on every rank once for each rank."""
    count_all(lambda sync, alike: alike is not sync._replicas)


def count_all(chosen: Callable[[Any, Any], bool]) -> None:
    """Lets each rank answer in the norm for all of what the members ``chosen(sync, members)`` hold alike, as if it were
    alone."""
    from stretto.sync import exact

    honest, piece = exact.ExactSum.square_sum, exact._piece

    def square_sum(self: Any) -> torch.Tensor:
        vars(exact)["_piece"] = lambda flat, alike: flat if chosen(self, alike) else piece(flat, alike)
        return honest(self)

    exact.ExactSum.square_sum = square_sum  # type: ignore[method-assign]


def ghost_in_batch_statistics(rank: int) -> None:
    """A BatchNorm counts the sample that a rank without samples runs to keep the others company."""
    from stretto.parallel.batchnorm import GlobalBatchNorm

    honest = GlobalBatchNorm.counting

    def counting(self: Any, counts: bool) -> AbstractContextManager[None]:
        return honest(self, True)

    GlobalBatchNorm.counting = counting  # type: ignore[assignment, method-assign]


def local_running_statistics(rank: int) -> None:
    """A BatchNorm normalises with the whole batch, and its buffers follow each rank's own share."""
    from stretto.parallel import batchnorm

    forward, track = batchnorm._forward, batchnorm._track
    seen: list[torch.Tensor] = []

    def see(norm: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        seen[:] = [x]
        return forward(norm, module, x)

    def track_own(module: Any, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        (x,) = seen
        own, middle = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
        track(module, middle, own, x.numel() / x.shape[1])

    vars(batchnorm).update(_forward=see, _track=track_own)
