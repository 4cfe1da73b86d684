"""A small Hugging Face T5, from its config alone: an encoder and a decoder with cross attention, relative position
biases that one layer makes for all, and one table for both sides and the head. It says a padded sentence backwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]
PADDING, FIRST_WORD, IGNORED = 0, 1, -100


class Sentences(Dataset[list[int]]):
    """Each counts up through the words by a step of its own; of varied length, 2 to ``length``."""

    def __init__(self, size: int, length: int, vocab: int, seed: int) -> None:
        self.size, self.length, self.vocab, self.seed = size, length, vocab, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[int]:
        drawn = torch.Generator().manual_seed(self.seed + index)
        first, step, length = (int(torch.randint(2, self.length + 1, (), generator=drawn)) for _ in range(3))
        return [FIRST_WORD + (first + step * place) % (self.vocab - FIRST_WORD) for place in range(length)]


def data(size: int = 41, length: int = 8, vocab: int = 30) -> dict[str, Dataset[Any]]:
    return {"train": Sentences(size, length, vocab, 0), "val": Sentences(11, length, vocab, 10_000)}


def collate(samples: list[list[int]]) -> Batch:
    """Padded to the longest of the piece: input_ids, attention_mask, decoder_input_ids and labels [batch, longest]."""
    longest = max(len(words) for words in samples)
    words = torch.tensor([[*each, *[PADDING] * (longest - len(each))] for each in samples])
    said = torch.tensor([[*reversed(each), *[PADDING] * (longest - len(each))] for each in samples])
    return {
        "input_ids": words,
        "attention_mask": (words != PADDING).long(),
        "decoder_input_ids": torch.cat([torch.full_like(said[:, :1], PADDING), said[:, :-1]], 1),
        "labels": said.masked_fill(said == PADDING, IGNORED),
    }


def model(depth: int = 2, width: int = 16, heads: int = 4, vocab: int = 30, dropout: float = 0.0) -> nn.Module:
    config = T5Config(
        vocab_size=vocab,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=depth,
        num_heads=heads,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=dropout,
        pad_token_id=PADDING,
        decoder_start_token_id=PADDING,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    return losses.cross_entropy(output.logits, batch["labels"], ignore_index=IGNORED)


def metrics(output: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    asked = batch["labels"] != IGNORED
    return {"accuracy": ((output.logits.argmax(-1) == batch["labels"]).logical_and(asked).sum(), asked.sum())}


def optimizer(params: Params, lr: float = 3e-3, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(params, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=21, unit="tokens")
