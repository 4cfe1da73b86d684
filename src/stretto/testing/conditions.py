"""Circumstances to plant in a worker, as faults are planted; under each of them the numbers must be the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def no_free_memory(rank: int) -> None:
    """Gradients of several microbatches don't fit whole, so they are sent after each microbatch."""
    from stretto import assemble

    vars(assemble)["free_bytes"] = lambda device: 0


def slow_rank(rank: int) -> None:
    """Rank 1 comes late to each vote and to each update, so that the others get as far ahead of it as they can."""
    from stretto.parallel import BoundOptimizer
    from stretto.step import Stepper

    if rank != 1:
        return
    for owner, name in ((Stepper, "_vote"), (BoundOptimizer, "step")):
        setattr(owner, name, _late(getattr(owner, name)))


def _late(call: Callable[..., Any]) -> Callable[..., Any]:
    def late(*arguments: Any) -> Any:
        time.sleep(0.05)
        return call(*arguments)

    return late


def separate_memory(rank: int) -> None:
    """No memory for the weights can be shared, as between hosts, so that each gathers what ``zero=3`` cuts."""
    from stretto.comm import members, shm_memory

    def refuse(self: object, num_bytes: int) -> None:
        raise shm_memory.Unavailable("a planted condition")

    members.Members.shared_memory = refuse  # type: ignore[assignment, method-assign]


def even_stages(rank: int) -> None:
    """Every operation costs the same, so that a model is always cut into the same stages."""
    from stretto.parallel import divided

    vars(divided)["costs_of"] = lambda work, *_: [(1.0, 1.0)] * len(work.nodes)


def host_apart(rank: int) -> None:
    """The device counts as another than the host, and nothing is too small to move, so that offloading moves things."""
    from stretto.parallel import offload

    vars(offload).update(is_host=lambda device: False, LEAST_BYTES=1)


def small_pieces(rank: int) -> None:
    """A piece of the traced graph costs nothing beside its inputs or its parameters, so that there are many."""
    from stretto.graph import pieces
    from stretto.parallel import gathered

    vars(pieces)["PIECE_BYTES"] = 0
    vars(gathered).update(LEAST_BYTES=1, PIECES=1000)
