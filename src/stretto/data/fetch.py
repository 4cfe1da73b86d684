"""Fetching the samples of a piece: keyed random numbers, collation, and the move to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from stretto.data.seeds import Generators, derive_seed, seed_items


def fetch(
    dataset: Dataset[Any],
    ids: Sequence[int],
    collate: Callable[[list[Any]], Any],
    seed: int,
    epoch: int | str,
) -> Any:
    """The collated samples ``ids``.

    ``__getitem__`` of each runs under generators keyed by (seed, epoch, id), so an augmentation draws the same
    numbers on whatever rank, in whatever batch, and after a restart. The global generators are left as they were.
    """
    before = Generators.remember()
    try:
        samples = []
        for index in ids:
            seed_items(derive_seed(seed, "item", epoch, index))
            samples.append(dataset[index])
        return collate(samples)
    finally:
        before.restore()


def to_device(tree: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """The same tree with its tensors on ``device`` and, where ``floating`` is given, real floats of that type.

    Tuples, named tuples, lists and mappings are rebuilt; whatever else stands in the tree is passed on as it is.
    """
    if isinstance(tree, torch.Tensor):
        dtype = floating if floating is not None and tree.is_floating_point() else tree.dtype
        return tree.to(device=device, dtype=dtype)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(to_device(value, device, floating) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(to_device(value, device, floating) for value in tree)
    if isinstance(tree, Mapping):
        return {key: to_device(value, device, floating) for key, value in tree.items()}
    return tree
