"""Faults of layers that are cut inside (``tp``)."""

from __future__ import annotations

from typing import Any

import torch


def partial_sums_not_added(rank: int) -> None:
    """What each rank adds up over its part of a layer is taken for the whole sum."""
    from stretto.parallel.messages import Leave

    Leave.forward = lambda self, x: x  # type: ignore[method-assign]


def gradient_of_one_part(rank: int) -> None:
    """What enters a cut layer gets this rank's gradient alone, not the sum over ranks."""
    from stretto.parallel.messages import Enter

    Enter.forward = lambda self, x: x  # type: ignore[method-assign]


def bias_on_every_rank(rank: int) -> None:
    """Each rank adds the bias to its part of a sum, so that it comes once for each rank."""
    from stretto.graph.localize import Localizer

    honest = Localizer._contract

    def contract(self: Localizer, node: Any, axis: Any) -> Any:
        new = honest(self, node, axis)
        if new.target is torch.ops.aten.add.Tensor:
            new.kwargs = {"alpha": self._cut.degree}
        return new

    Localizer._contract = contract  # type: ignore[method-assign]


def another_ranks_heads(rank: int) -> None:
    """A rank holds another rank's rows of the first fused weight that is cut, and its own of all others."""
    from stretto.parallel import divided, inside

    honest = inside.parts_of

    def parts(cut: Any, traced: Any, template: Any, place: int) -> Any:
        own, other = honest(cut, traced, template, place), honest(cut, traced, template, (place + 1) % cut.degree)
        first = next(name for name, part in own.items() if len(part.boxes) > 1)
        return {**own, first: other[first]}

    vars(divided)["parts_of"] = parts


def running_statistics_of_other_channels(rank: int) -> None:
    """A rank takes its part of a BatchNorm's running statistics for another rank's."""
    from stretto.parallel import divided, inside

    honest = inside.buffer_parts_of
    vars(divided)["buffer_parts_of"] = lambda cut, traced, module, place: honest(
        cut, traced, module, (place + 1) % cut.degree
    )


def norm_counts_whole_parameters_on_each_rank(rank: int) -> None:
    """In the norm of the gradient what is not cut counts once for each rank of the tensor group."""
    from stretto.testing.faults.measures import count_all

    count_all(lambda sync, alike: alike.size > sync._world.size)


def dropout_of_a_part_draws_its_own(rank: int) -> None:
    """Dropout inside a cut layer draws numbers for the part alone, so they are not those of the whole."""
    from stretto.parallel.messages import Drop

    def drop(self: Any, x: torch.Tensor, rate: float, *_: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(x, rate)

    Drop.forward = drop  # type: ignore[assignment, method-assign]


def samples_counted_on_each_rank(rank: int) -> None:
    """Ranks that share their samples count them each, in the sums of loss and weight."""
    from stretto.parallel import _base

    _base.Ranks.counts = True  # type: ignore[assignment, method-assign]
