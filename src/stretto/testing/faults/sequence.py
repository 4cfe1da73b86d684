"""Faults of values that lie in parts along a sequence (``sequence=true``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def norm_gradient_of_own_places(rank: int) -> None:
    """The gradient of a norm's weight, which each rank uses at its own places, is not added up over the ranks."""
    from stretto.graph.localize import Localizer

    honest = Localizer.inside

    def inside(self: Localizer, node: fx.Node, axis: Any) -> fx.Node:
        norms = [user for user in node.users if user.target is torch.ops.aten.layer_norm.default]
        own = axis in self._along and any(node is norm.args[2] for norm in norms)
        return self.whole(node) if own else honest(self, node, axis)

    Localizer.inside = inside  # type: ignore[method-assign]


def places_of_another_rank(rank: int) -> None:
    """Of what is whole a rank takes another rank's places of the sequence."""
    from stretto.parallel.sequence import Own

    honest = Own.forward

    def forward(self: Own, x: torch.Tensor, shape: list[int], dim: int, pieces: Any) -> torch.Tensor:
        return honest(self, x.roll(shape[dim] // len(pieces), dim), shape, dim, pieces)  # as long as its own

    Own.forward = forward  # type: ignore[method-assign]
