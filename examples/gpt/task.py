"""A byte-level GPT that learns the source code of Python's own standard library.

Every machine that can run this file already has its data. The model reads bytes and guesses the next one;
whole files are held out, so the figure to watch, ``bits_per_byte``, is a file compressor's figure on files
never seen in training. ``baselines()`` says what simpler means reach on the very same bytes.
"""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.errors import TaskError
from stretto.recipe import Recipe
from stretto.task import Params

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
HELD_OUT_ONE_IN = 24  # of the files
HELD_OUT_FILE_BYTES = 8 * 1024  # no single long file may rule the figure
HELD_OUT_BYTES = 128 * 1024
TRAIN_BYTES = 12 * 1024 * 1024


# ---------------------------------------------------------------------------------------------------- data


def _source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(path relative to ``root`` with forward slashes, path) of each source file, in one fixed order."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(files):
            # _sysconfigdata_* describes how this one interpreter was compiled.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def read_corpus(root: Path | None = None) -> tuple[bytes, bytes]:
    """The bytes to train on and the held-out bytes; a zero byte ends each file.

    A file is held out or not by the hash of its relative path, so that a file stays on its side when others
    come or go. Unreadable files are skipped.

    Raises:
        TaskError: there is too little source text to train on (a Python without its library's sources).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for name, path in _source_files(root):
        is_held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if is_held_out:
            held_out += text[:HELD_OUT_FILE_BYTES] + b"\0"
        elif len(train) < TRAIN_BYTES:
            train += text + b"\0"
    if len(train) < 100_000 or len(held_out) < 5_000:
        raise TaskError(
            f"expected the sources of Python's standard library under {root}, got only "
            f"{len(train) + len(held_out)} bytes; run with a Python that has its library as *.py files"
        )
    return bytes(train[:TRAIN_BYTES]), bytes(held_out[:HELD_OUT_BYTES])


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows one after another, without overlap: x [context] and, one byte on, y [context], both int64."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def data(context: int = 128) -> dict[str, Dataset[Any]]:
    train, held_out = read_corpus()
    return {"train": ByteWindows(train, context), "val": ByteWindows(held_out, context)}


def baselines() -> dict[str, float]:
    """Bits per byte that simpler means reach on the held-out bytes."""
    _, held_out = read_corpus()
    size = len(held_out)
    entropy = -sum(n / size * math.log2(n / size) for n in Counter(held_out).values())
    found = {"order-0 entropy": entropy}
    try:
        import lzma
    except ImportError:  # a Python that was compiled without liblzma
        return found
    packed = lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)
    return found | {"xz": 8 * len(packed) / size}


# --------------------------------------------------------------------------------------------------- model


class LookBack(nn.Module):
    """A normalised copy of x [batch, length, width] plus a weighted share, by channel, of the bytes before.

    A short causal convolution: it costs next to nothing and hands every layer its recent bytes, which
    attention alone takes thousands of steps to find. So et al., "Primer", 2021, put one into attention.
    """

    def __init__(self, width: int, reach: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(0.15 * torch.randn(reach, width))

    def forward(self, x: Tensor) -> Tensor:
        length, reach = x.shape[1], len(self.weight)
        x = self.norm(x)
        padded = F.pad(x, (0, 0, reach, 0))
        for i in range(reach):
            x = x + self.weight[i] * padded[:, i : i + length]
        return x


class Block(nn.Module):
    """Attention, then a two-layer MLP, each on a normalised copy and added back (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_in = LookBack(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = LookBack(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(out, self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_in(x))
        hidden = F.gelu(self.mlp_up(self.mlp_in(x)))
        return x + F.dropout(self.mlp_down(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """Bytes [batch, length] to logits [batch, length, 256]; input and output embeddings are one weight."""

    def __init__(self, depth: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.reset_parameters(depth)
        self.head.weight = self.embedding.weight

    def reset_parameters(self, depth: int) -> None:
        """Linear layers keep their input's size; the 2 * depth that add to the stream are scaled down."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
            elif isinstance(module, nn.Linear) and module is not self.head:
                added = name.endswith(("attention_out", "mlp_down"))
                scale = 1 / math.sqrt(2 * depth) if added else 1.0
                nn.init.normal_(module.weight, std=scale / math.sqrt(module.in_features))
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        h = self.dropout(self.embedding(x) + self.position(positions))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def model(
    depth: int = 3, width: int = 96, heads: int = 3, context: int = 128, dropout: float = 0.0
) -> nn.Module:
    if width % heads:
        raise TaskError(f"expected a width that its heads divide, got width={width} and heads={heads}")
    return GPT(depth, width, heads, context, dropout)


# ------------------------------------------------------------------------------------------------ learning


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(the cross entropies of all bytes, summed, in nats; the number of bytes)."""
    target = batch[1]
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, torch.tensor(target.numel(), device=output.device)


def summarize(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    total, num_bytes = totals["loss"]
    return {"bits_per_byte": total / num_bytes / math.log(2)}


def optimizer(
    params: Params, lr: float = 3e-3, weight_decay: float = 0.1, kind: str = "adamw"
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices only; biases and normalisation scales are left alone."""
    named = list(params.named())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=10 * lr, momentum=0.9)  # Adam's usual rates are too small for SGD
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))


def schedule(
    optimizer: torch.optim.Optimizer, steps: int, warmup: float = 0.05, floor: float = 0.02
) -> torch.optim.lr_scheduler.LRScheduler:
    """A linear warm-up over the share ``warmup`` of the steps, then a cosine to ``floor`` times the rate."""
    warmup_steps = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def recipe(batch: int = 8, steps: int = 2600) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=1.0, eval_every=max(1, steps // 2), unit="tokens", seed=1)
