"""Fetching the samples of a piece: keyed random numbers, and collation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from stretto.data.seeds import Generators, derive_seed, seed_items
from stretto.errors import TaskError


def fetch(
    dataset: Dataset[Any],
    ids: Sequence[int],
    collate: Callable[[list[Any]], Any],
    seed: int,
    epoch: int | str,
) -> Any:
    """The collated samples ``ids``.

    ``__getitem__`` of each runs under generators keyed by (seed, epoch, id), so an augmentation draws the same
    numbers on whatever rank, in whatever batch, and after a restart. The global generators are left as they were. An
    error in ``__getitem__`` carries a note that names the sample.

    Raises:
        TaskError: the dataset has become shorter.
    """
    before = Generators.remember()
    try:
        samples = []
        for index in ids:
            seed_items(derive_seed(seed, "item", epoch, index))
            try:
                samples.append(dataset[index])
            except Exception as error:
                if isinstance(error, IndexError) and index >= (length := len(dataset)):  # type: ignore[arg-type]
                    raise TaskError(
                        f"task: data(): there is no sample {index} any more, as the dataset's length is {length} now; "
                        "it must not change while a run is on: stop, and resume with the new data"
                    ) from error
                error.add_note(f"stretto: this was sample {index} of the dataset, in epoch {epoch}")
                raise
        return collate(samples)
    finally:
        before.restore()
