"""A batch of many types, which model and loss both insist on, however it is cut and whoever fetches it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from stretto.recipe import Recipe


class Marked(Tensor):
    """A tensor that carries a word."""

    mark: str


class Words(NamedTuple):
    """Strings and what may be missing."""

    words: list[str]
    missing: None


@dataclass(frozen=True)
class Batch:
    """As collate makes it; ``sequence`` and ``ragged`` are as long as each sample is."""

    x: Tensor
    marked: Marked
    sequence: PackedSequence
    ragged: list[Tensor]
    words: Words
    extras: OrderedDict[str, Any]

    def check(self) -> None:
        """Whether everything is what it was made as."""
        assert type(self.marked) is Marked and self.marked.mark == "kept"
        assert type(self.sequence) is PackedSequence and type(self.words) is Words and type(self.extras) is OrderedDict
        assert self.words.missing is None and [int(word) for word in self.words.words] == self.x[:, 0].tolist()
        assert [len(each) for each in self.ragged] == [1 + int(word) % 3 for word in self.words.words]
        assert self.extras == OrderedDict(flag=True, count=3, nested={"inner": (None, "text", 2.5)})


class Numbers(Dataset[int]):
    """The first ten."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def data() -> Dataset[int]:
    return Numbers()


def collate(samples: list[int]) -> Batch:
    x = torch.tensor(samples, dtype=torch.float64).unsqueeze(1)
    marked = x.clone().as_subclass(Marked)
    marked.mark = "kept"
    ragged = [torch.full((1 + sample % 3,), float(sample)) for sample in samples]
    sequence = pack_sequence([each.unsqueeze(1) for each in ragged], enforce_sorted=False)
    extras = OrderedDict(flag=True, count=3, nested={"inner": (None, "text", 2.5)})
    return Batch(x, marked, sequence, ragged, Words([str(sample) for sample in samples], None), extras)


class Model(nn.Module):
    """Takes the whole batch, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.recurrent = nn.RNN(1, 1)

    def forward(self, *, batch: Batch) -> Tensor:
        batch.check()
        assert batch.sequence.data.dtype == batch.ragged[0].dtype == torch.float64, "cast to what the model computes in"
        _, last = self.recurrent(batch.sequence)
        out: Tensor = self.linear(batch.x) + last[0]
        return out


def model() -> nn.Module:
    return Model()


def inputs(batch: Batch) -> dict[str, Any]:
    batch.check()
    return {"batch": batch}


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    batch.check()
    assert batch.ragged[0].dtype == torch.float32, "only what the model is called with is cast"
    return (output - batch.x).pow(2).sum(), torch.tensor(float(len(output)))


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def recipe(batch: int = 3, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, precision="fp64")
