"""Sequences, and between the networks that ``tp`` cuts all that may stand there.

What treats each place of a sequence by itself, in several layouts, and what looks at all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.recipe import Recipe
from stretto.task import Params

WORDS = 11
Pair = tuple[Tensor, Tensor]


class Sentences(Dataset[Pair]):
    """words [length], of which 0 is none, and a number []."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Pair:
        words = torch.randint(WORDS, (self.length,), generator=torch.Generator().manual_seed(index))
        return words, words.double().sin().sum()


class Network(nn.Module):
    """Two layers, that ``tp`` cuts by their hidden features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(x)))
        return found


class Block(nn.Module):
    """x [batch, length, width] and words [batch, length] -> [batch, length, width]; ``kind`` says how."""

    def __init__(self, kind: str, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.network, self.norm = kind, Network(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.rand(length, 1) + 0.5)
        self.taps = nn.Parameter(0.3 * torch.randn(2, width))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        match self.kind:
            case "turned":  # [length, batch, width]
                turned = x.transpose(0, 1)
                return self.dropout(turned + self.network(self.norm(turned))).transpose(0, 1)
            case "flat":  # [batch * length, width]
                flat = x.flatten(0, 1)
                return self.norm(flat + self.network(flat)).view(x.shape)
            case "own":  # a parameter of each place, and a mask
                found = (x + self.network(x)) * self.gain
                return self.norm(found.masked_fill((words == 0).unsqueeze(-1), 0.0))
            case "shifted":  # looks at the place before
                found = self.norm(x + self.network(x))
                return found + self.network(found + self.taps[0] * F.pad(found, (0, 0, 1, 0))[:, :-1])
            case "level":  # looks at all places, and comes back to each
                found = self.dropout(x + self.network(x))
                return self.norm(found * torch.sigmoid(found.mean(1, keepdim=True) * self.taps[1]))
            case "after":  # what all places have in common goes into what one rank has of them
                common = self.norm(x).mean(1, keepdim=True)
                return self.dropout(self.network(x)) * common + (x - common)
            case "root":  # an RMS norm by hand, a softmax over features
                found = x + self.network(x)
                found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-6) * self.taps[0]
                return found * found.softmax(-1)
            case "changed":  # in place
                found = self.dropout(x + self.network(x))
                found.mul_(self.taps[0]).add_(self.gain)
                return self.norm(found)
        raise ValueError(self.kind)


ALL = "turned-flat-own-shifted-level-after-root-changed"


class Reader(nn.Module):
    """words [batch, length] -> [batch]; or, with ``places``, of each place a number, [batch, length]."""

    def __init__(self, kinds: str, length: int, width: int, dropout: float, places: bool) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, width), places
        self.position = nn.Parameter(0.3 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(kind, length, width, dropout) for kind in kinds.split("-"))
        self.last = nn.Parameter(torch.randn(width))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.position
        for block in self.blocks:
            x = block(x, words)
        each = (x * self.last).sum(-1)
        return each if self.places else each.mean(-1)


def data(size: int = 29, length: int = 5) -> Sentences:
    return Sentences(size, length)


def model(
    kinds: str = ALL, length: int = 5, width: int = 6, dropout: float = 0.2, places: bool = False
) -> nn.Module:
    return Reader(kinds, length, width, dropout, places)


def loss(output: Tensor, batch: Pair) -> tuple[Tensor, Tensor]:
    wanted = batch[1] if output.dim() == 1 else batch[1].unsqueeze(-1)
    losses = (output - wanted).square()
    return losses.sum(), torch.tensor(losses.numel(), device=output.device)


def optimizer(params: Params, lr: float = 1e-2, kind: str = "adamw") -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 * lr) if kind == "sgd" else torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, seed=5)
