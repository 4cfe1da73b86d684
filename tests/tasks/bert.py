"""A small Hugging Face BERT, from its config alone: padded sentences, a mask, some of whose words are to be guessed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM

from stretto import losses
from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]
PADDING, MASK, FIRST_WORD, IGNORED = 0, 1, 2, -100


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


def data(size: int = 41, length: int = 10, vocab: int = 40) -> dict[str, Dataset[Any]]:
    return {"train": Sentences(size, length, vocab, 0), "val": Sentences(11, length, vocab, 10_000)}


def collate(samples: list[list[int]]) -> Batch:
    """Padded to the longest of the piece, so pieces of one batch have different lengths; every third word is masked.

    input_ids, attention_mask and labels [batch, longest]; labels are IGNORED where there is nothing to guess.
    """
    longest = max(len(words) for words in samples)
    words = torch.tensor([[*each, *[PADDING] * (longest - len(each))] for each in samples])
    here = words != PADDING
    hidden = here & (words % 3 == 0)
    return {
        "input_ids": words.masked_fill(hidden, MASK),
        "attention_mask": here.long(),
        "labels": words.masked_fill(~hidden, IGNORED),
    }


def model(depth: int = 2, width: int = 32, heads: int = 4, vocab: int = 40, dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PADDING,
    )
    return BertForMaskedLM(config)


def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    return losses.cross_entropy(output.logits, batch["labels"], ignore_index=IGNORED)


def metrics(output: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    asked = batch["labels"] != IGNORED
    return {"accuracy": ((output.logits.argmax(-1) == batch["labels"]).logical_and(asked).sum(), asked.sum())}


def optimizer(params: Params, lr: float = 3e-3, kind: str = "adamw") -> torch.optim.Optimizer:
    named = list(params.named())
    groups = [
        {"name": "matrices", "params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"name": "vectors", "params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(groups, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=9, unit="tokens")
