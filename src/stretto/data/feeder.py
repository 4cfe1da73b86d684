"""What hands a rank its samples, piece by piece: from the dataset here, or from loaders that work ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from torch.utils.data import Dataset

from stretto.data.fetch import fetch
from stretto.data.loader import Loaders
from stretto.errors import TaskError

Wanted = tuple[tuple[int, ...], int | str]  # ids, epoch
_AHEAD: Final = 2  # pieces that each loader works ahead, as in torch's DataLoader


class Feeder:
    """The samples of one split on one rank. What it hands out depends on what is asked for, never on who fetches it or
    when: with any number of loaders, in any order and however often.

    Args:
        dataset: map-style.
        collate: makes one batch of a list of samples.
        seed: the recipe's.
        split: its name, for loaders and for people.
        loaders: fetch ahead in processes of their own; None: everything is fetched here, when it is asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        seed: int,
        split: str = "train",
        loaders: Loaders | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate, self._seed, self._split, self._loaders = collate, seed, split, loaders
        self._length = len(dataset)  # type: ignore[arg-type]
        self._epoch: int | str | None = None
        self._coming: Iterator[Wanted] = iter(())
        self._under_way: deque[tuple[Wanted, int]] = deque()

    def __len__(self) -> int:
        return self._length

    def expect(self, pieces: Iterable[Wanted]) -> None:
        """Says what will be asked for from now on, in order; loaders begin with it. Endless iterables are welcome.

        A help only: what comes otherwise is fetched all the same, and what never comes does no harm.
        """
        if self._loaders is None:
            return
        for _, ticket in self._under_way:
            self._loaders.forget(ticket)
        self._under_way.clear()
        self._coming = iter(pieces)
        self._fill(self._loaders)

    def get(self, ids: tuple[int, ...], epoch: int | str) -> Any:
        """The collated samples ``ids`` in ``epoch`` (its number, or ``"evaluate"``).

        Raises:
            TaskError: the dataset's length has changed since the start.
            LoaderError: a loader has died.
            Exception: whatever the dataset or ``collate`` raises.
        """
        if epoch != self._epoch:
            self._check_length()
            self._epoch = epoch
        if self._loaders is None:
            return fetch(self.dataset, ids, self._collate, self._seed, epoch)
        wanted = (ids, epoch)
        ticket = next((ticket for piece, ticket in self._under_way if piece == wanted), None)
        if ticket is None:  # a step that is done anew, or one that nobody announced
            ticket = self._loaders.submit((self._split, ids, epoch))
        else:
            self._under_way.remove((wanted, ticket))
        self._fill(self._loaders)
        return self._loaders.take(ticket)

    def close(self) -> None:
        """Ends the loaders, which the feeders of a run share; may be called again."""
        if self._loaders is not None:
            self._loaders.close()

    def _fill(self, loaders: Loaders) -> None:
        for ids, epoch in islice(self._coming, max(0, _AHEAD * len(loaders) - len(self._under_way))):
            self._under_way.append(((ids, epoch), loaders.submit((self._split, ids, epoch))))

    def _check_length(self) -> None:
        length = len(self.dataset)  # type: ignore[arg-type]
        if length != self._length:
            raise TaskError(
                f"task: data()[{self._split!r}] had {self._length} samples when the run started and has {length} now; "
                "the length must not change while a run is on: stop, and resume with the new data"
            )


def open_feeders(
    datasets: Mapping[str, Dataset[Any]], collate: Callable[[list[Any]], Any], seed: int, num_loaders: int
) -> dict[str, Feeder]:
    """A feeder for each split; ``num_loaders`` processes serve them all."""
    loaders = Loaders(datasets, collate, seed, num_loaders) if num_loaders else None
    return {name: Feeder(dataset, collate, seed, name, loaders) for name, dataset in datasets.items()}
