"""How many samples each split has: the same on every rank, for a whole start, and within an epoch over resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.data.sampler import Position
from stretto.errors import CheckpointError, TaskError

Lengths = dict[str, int]  # samples by split


def lengths_of(datasets: Mapping[str, Any]) -> Lengths:
    """The length of each split's dataset."""
    return {name: len(dataset) for name, dataset in datasets.items()}


def check_lengths(by_rank: Sequence[Lengths]) -> Lengths:
    """The lengths that all ranks have.

    Raises:
        TaskError: ranks that see different data would train on other samples than the ledger says; or a split without
            a sample.
    """
    splits = list(dict.fromkeys(name for lengths in by_rank for name in lengths))
    for split in splits:
        ranks: dict[int | None, list[int]] = {}
        for rank, lengths in enumerate(by_rank):
            ranks.setdefault(lengths.get(split), []).append(rank)
        if len(ranks) > 1:
            seen = ", ".join(
                f"{'nothing' if length is None else length} on rank{'s' if len(own) > 1 else ''} "
                f"{', '.join(map(str, own))}"
                for length, own in ranks.items()
            )
            raise TaskError(
                f"task: data() differs between the ranks: the number of samples in {split!r} is {seen}; every rank "
                "must build the whole dataset (stretto cuts it), from the same files"
            )
        if not by_rank[0][split]:
            raise TaskError(f"task: data()[{split!r}] is empty; give it at least one sample, or leave the split out")
    return by_rank[0]


def resumed_position(step: int, meta: Mapping[str, Any], now: int) -> tuple[Position, str | None]:
    """Where a run goes on from the checkpoint of ``step`` with ``now`` training samples; and what there is to note.

    Raises:
        CheckpointError: the length has changed in the middle of an epoch, whose order is one of all its samples.
    """
    position = Position(meta["position"]["epoch"], meta["position"]["offset"])
    before = meta.get("lengths", {}).get("train", now)  # older checkpoints have none
    if before == now:
        return position, None
    if 0 < position.offset < before:
        raise CheckpointError(
            f"checkpoint {step}: data()['train'] had {before} samples and has {now} now, and epoch {position.epoch} "
            f"stands at sample {position.offset}: what is left of it can't be told from what was seen. Resume with the "
            "data as it was; at the end of an epoch the length may change"
        )
    epoch = position.epoch + (position.offset >= before)
    return Position(epoch, 0), f"data()['train'] had {before} samples and has {now} from epoch {epoch} on"
