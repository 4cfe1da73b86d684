"""Which samples a rank is really fed: dataset and sync rule are wrapped, the engine in between is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from stretto.sync import Sync


class Feed:
    """Notes of one step: samples fetched for microbatches that count, and for ghosts."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._num_ghosts = 0

    def clear(self) -> None:
        """A step begins, perhaps anew."""
        self._ids, self._num_ghosts = [], 0

    def note(self, index: int) -> None:
        """The sample was fetched."""
        self._ids.append(index)

    def ran(self, ghost: bool) -> None:
        """A microbatch was run; a ghost has one sample, and a rank's ghosts come last."""
        self._num_ghosts += ghost

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The samples that counted and those that didn't, in order."""
        counted = len(self._ids) - self._num_ghosts
        return tuple(self._ids[:counted]), tuple(self._ids[counted:])


class WatchedDataset(Dataset[Any]):
    """A map-style dataset that notes what is read from it."""

    def __init__(self, dataset: Dataset[Any], feed: Feed) -> None:
        self._dataset, self._feed = dataset, feed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._feed.note(index)
        return self._dataset[index]


class WatchedSync:
    """A sync rule that notes when a step begins and which microbatches are ghosts; see :class:`Sync`."""

    def __init__(self, sync: Sync, feed: Feed) -> None:
        self._sync, self._feed = sync, feed

    def begin(self) -> None:
        """See :class:`Sync`."""
        self._feed.clear()
        self._sync.begin()

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Sync`."""
        self._feed.ran(ghost)
        with self._sync.microbatch(last, ghost):
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
