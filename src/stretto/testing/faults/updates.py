"""Weights, groups and shares that are not what they should be after an update."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stretto.testing.faults.planting import FAULTY_RANK, change_update


def other_initial_weights(rank: int) -> None:
    """One rank begins with its own initialisation."""
    if rank != FAULTY_RANK:
        return
    from stretto.parallel import whole

    honest = whole.Whole.import_state

    def import_state(self: Any, source: Any) -> None:
        honest(self, source)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for place in self.places.values():
                place.local.add_(0.01 * torch.rand(place.local.shape, generator=generator))

    whole.Whole.import_state = import_state  # type: ignore[method-assign]


def stale_shard(rank: int) -> None:
    """On one rank the first parameter misses one update."""

    def forgetful(gradients: dict[str, Any]) -> dict[str, Any]:
        return {**gradients, next(iter(gradients)): None}

    if rank == FAULTY_RANK:
        change_update(forgetful)


def applied_on_one_rank(rank: int) -> None:
    """One step is applied on one rank only."""
    if rank != FAULTY_RANK:
        change_update(lambda gradients: None)


def shares_not_gathered(rank: int) -> None:
    """After an update forward goes on with the other owners' old weights (zero=1 and 2)."""
    from stretto.parallel.flats import Flats

    honest = Flats.bring

    def bring(self: Any) -> None:
        honest(self)
        self.bring = lambda: None

    Flats.bring = bring  # type: ignore[method-assign]


def lost_group(rank: int) -> None:
    """Every group of the optimizer has the first one's learning rate, weight decay and so on."""
    from stretto.parallel import BoundOptimizer

    honest = BoundOptimizer.__init__

    def bind(self: Any, *arguments: Any) -> None:
        honest(self, *arguments)
        first, *others = self.optimizer.param_groups
        for group in others:
            group.update({key: value for key, value in first.items() if key != "params"})

    BoundOptimizer.__init__ = bind  # type: ignore[assignment, method-assign]


def missed_gradient(rank: int) -> None:
    """A rank whose samples didn't use a parameter doesn't learn that another's did, and leaves it alone."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        own = tuple(flag > 0 for flag in self.on.sync.reached().tolist())
        return dataclasses.replace(honest(self, step, terms), reached=own)

    Stepper._vote = vote  # type: ignore[method-assign]
