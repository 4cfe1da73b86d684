"""A small Hugging Face Llama, from its config alone: grouped heads, rotary positions, float32 RMS norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from stretto.errors import TaskError
from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]


class Documents(Dataset[Batch]):
    """Token walks of varied length: input_ids [length], labels [length], -100 from the document's end on."""

    def __init__(self, size: int, length: int, vocab: int, seed: int) -> None:
        self.size, self.length, self.vocab, self.seed = size, length, vocab, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.Generator().manual_seed(self.seed + index)
        steps = torch.randint(1, 4, (self.length + 1,), generator=drawn)
        tokens = steps.cumsum(0) % self.vocab
        labels = tokens[1:].clone()
        labels[int(torch.randint(1, self.length + 1, (), generator=drawn)) :] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


def data(size: int = 53, length: int = 12, vocab: int = 96) -> dict[str, Dataset[Any]]:
    return {"train": Documents(size, length, vocab, 0), "val": Documents(11, length, vocab, 10_000)}


def model(
    depth: int = 2,
    width: int = 64,
    heads: int = 4,
    groups: int = 2,
    vocab: int = 96,
    tied: bool = False,
    attention: str = "sdpa",
) -> nn.Module:
    """``groups`` key-value heads are shared by ``heads`` query heads; ``attention`` is sdpa or eager."""
    if attention not in ("sdpa", "eager"):
        raise TaskError(f"expected attention to be sdpa or eager, got {attention!r}")
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    # As from_config(attn_implementation=...) does; the config's own constructor declares no such argument.
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"]}


def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, labels = output.logits, batch["labels"]  # already shifted by the data set
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def optimizer(params: Params, lr: float = 3e-3, kind: str = "adamw") -> torch.optim.Optimizer:
    named = list(params.named())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(groups, lr=lr)


def recipe(batch: int = 7, steps: int = 5, clip: float = 1.0) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=clip, seed=7, unit="tokens")
