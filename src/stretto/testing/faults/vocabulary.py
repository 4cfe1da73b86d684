"""Faults of tables and classes that lie in parts on the ranks (``tp``)."""

from __future__ import annotations

from typing import Any

import torch


def target_counted_on_every_rank(rank: int) -> None:
    """Ranks without a target's class add the logit of another one of theirs to it."""
    from stretto.parallel import spread

    honest, places_of = spread.CrossEntropy.forward, spread.places_of

    def everywhere(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places, inside = places_of(*given)
        return places, torch.ones_like(inside)

    def forward(self: Any, *given: Any) -> torch.Tensor:
        vars(spread)["places_of"] = everywhere
        try:
            return honest(self, *given)
        finally:
            vars(spread)["places_of"] = places_of

    spread.CrossEntropy.forward = forward  # type: ignore[assignment, method-assign]


def exponentials_of_own_classes(rank: int) -> None:
    """The sum of exponentials, by which a loss of logits divides, is of a rank's own classes alone."""
    from stretto.parallel.spread import _ClassesFunction

    honest = _ClassesFunction.forward

    class Own:
        def __init__(self, members: Any) -> None:
            self.members = members

        def all_gather(self, told: torch.Tensor) -> list[torch.Tensor]:
            found: list[torch.Tensor] = self.members.all_gather(told)
            for place, one in enumerate(found):
                if place != self.members.rank:
                    one[0].fill_(-torch.inf)
            return found

    def forward(ctx: Any, x: torch.Tensor, places: Any, inside: Any, dim: int, members: Any) -> Any:
        return honest(ctx, x, places, inside, dim, Own(members))  # type: ignore[arg-type]

    _ClassesFunction.forward = forward  # type: ignore[method-assign]


def rows_of_other_ranks_not_zero(rank: int) -> None:
    """A rank that lacks a row gives another of its own in its place."""
    from stretto.parallel import spread

    def rows(self: Any, table: torch.Tensor, index: torch.Tensor, padding: int, pieces: Any, size: int) -> torch.Tensor:
        return torch.nn.functional.embedding(spread.places_of(index, pieces, size)[0], table)

    spread.Rows.forward = rows  # type: ignore[method-assign]
