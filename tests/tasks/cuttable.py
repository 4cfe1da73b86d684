"""Tasks that look dangerous and whose numbers are the same for any cut of a batch; ``kind`` chooses."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

VOCAB, WIDTH = 11, 8
RAGGED = ("packed lstm", "masked attention", "token layers")


class Samples(Dataset[dict[str, Tensor]]):
    """A point x [8] with a class y and a weight, and a sequence of tokens [1..6] with the next one of each."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCAB, (2 + index % 6,), generator=drawn)
        x = torch.randn(WIDTH, generator=drawn)
        if index % 2:
            x = x + 0.1 * torch.randn(WIDTH)  # an augmentation, under the keyed generator
        y = torch.tensor(-100 if index % 4 == 3 else int(x[:3].argmax()))
        return {"x": x, "y": y, "weight": torch.rand((), generator=drawn), "tokens": tokens[:-1], "next": tokens[1:]}


class PackedLstm(nn.Module):
    """Tokens, packed, to logits [batch, length, vocab]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, dropout=0.2, batch_first=True)

    def forward(self, packed: Any) -> Tensor:
        hidden, _ = self.lstm(packed._replace(data=self.embedding(packed.data)))
        out, _ = pad_packed_sequence(hidden, batch_first=True)
        return self.head(out)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A transformer over padded tokens whose output layer is its embedding; padding is masked."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Residual layers behind gates that begin at zero, of which some are dropped at random (Python's generator)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.out = nn.Parameter(torch.zeros(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for gate, layer in zip(self.gate, self.layers, strict=True):
            if random.random() > 0.3:
                x = x + gate * torch.tanh(layer(x))
        return self.out(x)  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Noise, jitter and a sampled choice, all from torch's global generator; in bfloat16 where asked."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.half_, self.inner, self.out = half, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.half_:
            return self.out((h.to(torch.bfloat16) * 3).to(h.dtype))  # type: ignore[no-any-return]
        h = h + torch.randn_like(h) * torch.empty_like(h).uniform_(0.9, 1.1)
        return self.out(h * torch.bernoulli(h.sigmoid()))  # type: ignore[no-any-return]


def model(kind: str = "mlp", dropout: float = 0.3) -> nn.Module:
    hidden: dict[str, list[nn.Module]] = {
        "dropout": [nn.Dropout(dropout), nn.AlphaDropout(dropout)],
        "batch norm": [nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)],
        "layer norm": [nn.LayerNorm(WIDTH)],
        "spectral norm": [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    }
    if kind == "packed lstm":
        return PackedLstm()
    if kind in ("masked attention", "token layers"):
        return Tied(dropout if kind == "masked attention" else 0.0)
    if kind == "group norm":
        parts = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 3)]
        return nn.Sequential(*parts)
    if kind == "dropped layers":
        return Layers()
    if kind in ("noise", "half precision"):
        return Noisy(kind == "half precision")
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *hidden.get(kind, []), nn.Linear(WIDTH, 3))


def data() -> Dataset[Any]:
    return Samples()


def collate(samples: list[dict[str, Tensor]], kind: str = "mlp") -> dict[str, Any]:
    batch: dict[str, Any] = {key: torch.stack([each[key] for each in samples]) for key in ("x", "y", "weight")}
    for key in ("tokens", "next"):
        batch[key] = pad_sequence([each[key] for each in samples], batch_first=True)
    if kind == "packed lstm":
        batch["packed"] = pack_sequence([each["tokens"] for each in samples], enforce_sorted=False)
    return batch


def inputs(batch: dict[str, Any], kind: str = "mlp") -> Any:
    return (batch["packed" if kind == "packed lstm" else "tokens" if kind in RAGGED else "x"],)


def loss(output: Tensor, batch: dict[str, Any], kind: str = "mlp") -> tuple[Tensor, Tensor]:
    if kind in RAGGED:
        return losses.cross_entropy(output, batch["next"], ignore_index=0)
    if kind == "weights":
        each = losses.cross_entropy(output, batch["y"], weights=batch["weight"])
        return each[0], (batch["weight"] * (batch["y"] >= 0)).sum()
    if kind == "half precision":  # where a sum depends on its order
        return (output.abs().to(torch.bfloat16) / 3).sum(), torch.tensor(len(output))
    return losses.cross_entropy(output, batch["y"])


def metrics(output: Tensor, batch: dict[str, Any], kind: str = "mlp") -> dict[str, tuple[Tensor, Tensor]]:
    target = batch["next"] if kind in RAGGED else batch["y"]
    return {"accuracy": ((output.argmax(-1) == target).sum(), (target > 0).sum())}


def optimizer(params: Params, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 8, steps: int = 3) -> Recipe:
    return Recipe(batch=batch, steps=steps)
