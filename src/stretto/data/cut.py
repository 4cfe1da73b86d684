"""Cutting a global batch: a list of sample ids becomes the pieces of ranks and microbatches, before collation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """The samples of one microbatch on one rank.

    Args:
        ids: the dataset indices to fetch; never empty.
        first: position of the first of them in the global batch; keys the random numbers of forward.
        ghost: True where this rank has no sample of its own: ``ids`` is then one real sample of the batch that is run
            with weight 0, so that the rank enters every collective.
    """

    ids: tuple[int, ...]
    first: int
    ghost: bool = False

    @property
    def num_samples(self) -> int:
        """Samples that count: 0 for a ghost."""
        return 0 if self.ghost else len(self.ids)


def cut(ids: Sequence[int], num_ranks: int, microbatches: int, rank: int) -> tuple[Piece, ...]:
    """The ``microbatches`` pieces of ``rank``.

    The batch is cut into ``num_ranks * microbatches`` contiguous pieces whose sizes differ by at most one, the longer
    ones first, and dealt in order. So four ranks with one microbatch see the pieces of one rank with four.

    Raises:
        ValueError: an empty batch.
    """
    if not ids:
        raise ValueError("a global batch needs at least one sample")
    total = num_ranks * microbatches
    size, longer = divmod(len(ids), total)
    pieces = []
    for index in range(rank * microbatches, (rank + 1) * microbatches):
        start = index * size + min(index, longer)
        stop = start + size + (index < longer)
        own = tuple(ids[start:stop])
        pieces.append(Piece(own, start) if own else Piece((ids[0],), start, ghost=True))
    return tuple(pieces)
