"""The global-index sampler: one order of the whole dataset per epoch, known to every rank, cut by nobody here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from stretto.data.seeds import derive_seed
from stretto.errors import TaskError


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: samples ``[0, offset)`` of ``epoch`` are committed."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class BatchHandle:
    """One global batch: which samples, not their tensors.

    Args:
        step: the committed step this batch will become, counted from 1.
        start: where the batch begins in the data.
        end: where the data stands after it.
        ids: dataset indices of the whole global batch, in order.
    """

    step: int
    start: Position
    end: Position
    ids: tuple[int, ...]

    def __iter__(self) -> Iterator[int]:
        """Raises TaskError: whoever unpacks a handle takes it for the batch itself."""
        raise TaskError("run.batches() yields handles (sample ids), not tensors; pass each to run.step(batch)")


@dataclass(frozen=True)
class Sampler:
    """Yields the global batches of a run.

    An epoch is a seeded permutation of ``range(length)``; its last batch is short rather than dropped, padded or
    filled from the next epoch, so every sample comes exactly once an epoch.
    """

    length: int
    batch: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Raises TaskError for an empty dataset."""
        if self.length < 1:
            raise TaskError("task: data()['train'] is empty; give it at least one sample")

    def order(self, epoch: int) -> numpy.ndarray:
        """The dataset indices of ``epoch`` in their order, shape [length], int64."""
        if not self.shuffle:
            return numpy.arange(self.length)
        return numpy.random.Generator(numpy.random.PCG64(derive_seed(self.seed, "order", epoch))).permutation(
            self.length
        )

    def batches(self, first_step: int, start: Position) -> Iterator[BatchHandle]:
        """Endless batches from ``start`` on, the first of which is step ``first_step``."""
        step, epoch, offset = first_step, start.epoch, start.offset
        while True:
            if offset >= self.length:
                epoch, offset = epoch + 1, 0
            order = self.order(epoch)
            while offset < self.length:
                stop = min(offset + self.batch, self.length)
                ids = tuple(int(i) for i in order[offset:stop])
                yield BatchHandle(step, Position(epoch, offset), Position(epoch, stop), ids)
                step, offset = step + 1, stop
