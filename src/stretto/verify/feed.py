"""Which samples a rank is really fed: dataset and sync rule are wrapped, the engine in between is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from stretto.data import Feeder
from stretto.sync import Sync
from stretto.task import Task


class Feed:
    """Notes of one step: samples fetched for microbatches that count, and for ghosts."""

    def __init__(self) -> None:
        self._pieces: list[list[int]] = []
        self._ids: list[int] = []
        self._ghosts: list[int] = []

    def clear(self) -> None:
        """A step begins, perhaps anew."""
        self._pieces, self._ids, self._ghosts = [], [], []

    def begin(self) -> None:
        """Samples are about to be fetched for one more microbatch."""
        self._pieces.append([])

    def note(self, index: int) -> None:
        """The sample was fetched."""
        self._pieces[-1].append(index)

    def use(self, ghost: bool) -> None:
        """A microbatch runs on the samples that were fetched first of those that no microbatch has used."""
        if self._pieces:
            (self._ghosts if ghost else self._ids).extend(self._pieces.pop(0))

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The samples that counted and those that didn't, in order."""
        return tuple(self._ids), tuple(self._ghosts)


class WatchedDataset(Dataset[Any]):
    """A map-style dataset that notes what is read from it."""

    def __init__(self, dataset: Dataset[Any], feed: Feed) -> None:
        self._dataset, self._feed = dataset, feed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._feed.note(index)
        return self._dataset[index]


class WatchedFeeder(Feeder):
    """A feeder without loaders that notes where the samples of one microbatch end; ``dataset`` notes which they are."""

    def __init__(self, dataset: WatchedDataset, task: Task, feed: Feed) -> None:
        super().__init__(dataset, task.collate, task.recipe.seed)
        self._feed = feed

    def get(self, ids: tuple[int, ...], epoch: int | str) -> Any:
        """See :class:`Feeder`."""
        self._feed.begin()
        return super().get(ids, epoch)


class WatchedSync:
    """A sync rule that notes when a step begins and which microbatches are ghosts; see :class:`Sync`."""

    def __init__(self, sync: Sync, feed: Feed) -> None:
        self._sync, self._feed = sync, feed

    def begin(self) -> None:
        """See :class:`Sync`."""
        self._feed.clear()
        self._sync.begin()

    @contextmanager
    def microbatch(self, last: bool, ghost: bool, ends: bool = True) -> Iterator[None]:
        """See :class:`Sync`."""
        if ends:  # several actions of a pipeline run on one microbatch
            self._feed.use(ghost)
        with self._sync.microbatch(last, ghost, ends):
            yield

    def finish(self) -> None:
        """See :class:`Sync`."""
        self._sync.finish()

    def agrees(self) -> bool:
        """See :class:`Sync`."""
        return self._sync.agrees()

    def mark(self) -> int:
        """See :class:`Sync`."""
        return self._sync.mark()

    def square_sum(self) -> torch.Tensor:
        """See :class:`Sync`."""
        return self._sync.square_sum()

    def reached(self) -> torch.Tensor:
        """See :class:`Sync`."""
        return self._sync.reached()

    def scale(self, factor: float) -> None:
        """See :class:`Sync`."""
        self._sync.scale(factor)

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """See :class:`Sync`."""
        return self._sync.gradients()

    def detach(self) -> None:
        """See :class:`Sync`."""
        self._sync.detach()
