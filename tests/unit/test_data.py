"""Cutting, sampling and seeding: the same batch, the same numbers, wherever they run."""

from __future__ import annotations

import random
import traceback
from collections import namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from stretto.data import Generators, Position, Sampler, cut, derive_seed, fetch, seed_everything, to_device
from stretto.errors import TaskError


@given(some.integers(1, 40), some.integers(1, 6), some.integers(1, 4))
def test_a_batch_is_cut_into_all_of_itself(length: int, ranks: int, microbatches: int) -> None:
    ids = list(range(100, 100 + length))
    pieces = [piece for rank in range(ranks) for piece in cut(ids, ranks, microbatches, rank)]
    assert [index for piece in pieces if not piece.ghost for index in piece.ids] == ids
    sizes = [piece.num_samples for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert all(piece.ids and set(piece.ids) <= set(ids) for piece in pieces), "a ghost runs a real sample"
    assert all(ids[piece.first] == piece.ids[0] for piece in pieces if not piece.ghost)
    assert len(pieces) == ranks * microbatches


@given(some.integers(1, 40), some.integers(1, 4), some.integers(1, 4))
def test_ranks_and_microbatches_see_the_same_pieces(length: int, ranks: int, microbatches: int) -> None:
    spread = [piece for rank in range(ranks) for piece in cut(range(length), ranks, microbatches, rank)]
    assert spread == list(cut(range(length), 1, ranks * microbatches, 0))


@given(some.integers(1, 30), some.integers(1, 9), some.integers(0, 5))
def test_every_sample_comes_once_an_epoch(length: int, batch: int, seed: int) -> None:
    sampler = Sampler(length, batch, seed)
    batches = sampler.batches(1, Position())
    for epoch in range(3):
        seen: list[int] = []
        while len(seen) < length:
            handle = next(batches)
            assert handle.start == Position(epoch, len(seen))
            seen += handle.ids
            assert handle.end == Position(epoch, len(seen))
        assert sorted(seen) == list(range(length))


@given(some.integers(2, 30), some.integers(1, 9), some.integers(0, 25))
def test_batches_go_on_from_any_position(length: int, batch: int, skip: int) -> None:
    sampler = Sampler(length, batch, 7)
    whole = sampler.batches(1, Position())
    before = [next(whole) for _ in range(skip)]
    start = before[-1].end if before else Position()
    resumed = sampler.batches(skip + 1, start)
    assert [next(resumed) for _ in range(5)] == [next(whole) for _ in range(5)]


def test_an_empty_dataset_is_one_line() -> None:
    with pytest.raises(TaskError, match="empty"):
        Sampler(0, 4, 0)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from every generator in __getitem__."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(torch.rand(())), random.random(), float(numpy.random.rand())]) + index


def test_samples_draw_the_same_numbers_in_any_company() -> None:
    alone = [fetch(Noisy(), [index], torch.stack, 3, 0)[0] for index in (4, 1, 8)]
    together = fetch(Noisy(), [4, 1, 8], torch.stack, 3, 0)
    assert torch.equal(torch.stack(alone), together)
    assert not torch.equal(fetch(Noisy(), [4], torch.stack, 3, 1), fetch(Noisy(), [4], torch.stack, 3, 0)), "by epoch"
    assert not torch.equal(fetch(Noisy(), [4], torch.stack, 4, 0), fetch(Noisy(), [4], torch.stack, 3, 0)), "by seed"


def test_fetching_leaves_the_global_generators_alone() -> None:
    seed_everything(1)
    expected = (float(torch.rand(())), random.random(), float(numpy.random.rand()))
    seed_everything(1)
    fetch(Noisy(), [1, 2], torch.stack, 0, 0)
    assert (float(torch.rand(())), random.random(), float(numpy.random.rand())) == expected


def test_generators_survive_json() -> None:
    seed_everything(5)
    numpy.random.randn()  # leaves a second Gaussian behind, which is state too
    record = Generators.remember().to_json()
    expected = (float(torch.rand(())), random.random(), float(numpy.random.randn()))
    seed_everything(6)
    Generators.from_json(record).restore()
    assert (float(torch.rand(())), random.random(), float(numpy.random.randn())) == expected


def test_seeding_is_torchs_own_and_formats_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's formats one for each kind of device that isn't in use: most of what a small forward took."""
    torch.manual_seed(2**62 + 3)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("a stack is formatted"))
    seed_everything(2**62 + 3)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_differ_by_every_part_of_their_key() -> None:
    keys = [(0, "item", 0, 1), (0, "item", 1, 0), (1, "item", 0, 1), (0, "forward", 0, 1), (0, "item", 0, 11)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)


def test_a_tree_keeps_its_shape() -> None:
    pair = namedtuple("pair", "x y")
    tree = {"a": pair(torch.ones(2), [torch.ones(1, dtype=torch.int64), "text"]), "b": (None, 3)}
    moved = to_device(tree, torch.device("cpu"), torch.float64)
    assert isinstance(moved["a"], pair) and moved["a"].x.dtype == torch.float64
    assert moved["a"].y[0].dtype == torch.int64 and moved["a"].y[1] == "text" and moved["b"] == (None, 3)
