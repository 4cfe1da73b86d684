"""Circumstances to plant in a worker, as faults are planted; under each of them the numbers must be the same."""

from __future__ import annotations


def no_free_memory(rank: int) -> None:
    """Gradients of several microbatches don't fit whole, so they are sent after each microbatch."""
    from stretto import assemble

    vars(assemble)["free_bytes"] = lambda device: 0
