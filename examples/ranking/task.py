"""Which user clicks which item: two towers, one of each, whose vectors' product is the score.

The embeddings are sparse: a batch touches a few rows of a long table, and only these get a gradient. Every example has
a weight (how long the item was looked at). AUC compares every click with every miss of the whole held-out split, so it
is made of rows, in ``summarize``: no mean over batches could be it. ``baselines()`` says what is reached by whoever
does not know the user.

The clicks are made up, from a seed: hidden tastes of users and contents of items, of which the tags tell a little.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.errors import TaskError
from stretto.losses import binary_cross_entropy_with_logits
from stretto.recipe import Recipe
from stretto.task import Params

Batch = dict[str, Tensor]
TAGS = 24
TAGS_AN_ITEM = 4
HIDDEN = 5  # numbers that a taste is made of


# ---------------------------------------------------------------------------------------------------- data


class Views(Dataset[Batch]):
    """Which item was shown to whom, and what came of it: user [], item [], tags [4], click [], weight []."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["click"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def made_up(users: int, items: int, views: int, seed: int) -> Batch:
    """The columns of ``views`` views. Item 0 is like any other, tag 0 means no tag; an item has one to four."""
    drawn = torch.Generator().manual_seed(seed)
    tastes = torch.randn(users, HIDDEN, generator=drawn)
    contents = torch.randn(items, HIDDEN, generator=drawn)
    appeal = 0.7 * torch.randn(items, generator=drawn)
    close = contents @ torch.randn(HIDDEN, TAGS, generator=drawn)
    tags = 1 + close.topk(TAGS_AN_ITEM).indices
    tags[torch.arange(TAGS_AN_ITEM) >= torch.randint(1, TAGS_AN_ITEM + 1, (items, 1), generator=drawn)] = 0
    popularity = 1 / (10 + torch.randperm(items, generator=drawn))
    user = torch.randint(users, (views,), generator=drawn)
    item = torch.multinomial(popularity, views, replacement=True, generator=drawn)
    liking = 1.2 * (tastes[user] * contents[item]).sum(1) + appeal[item] - 1
    click = (torch.rand(views, generator=drawn) < liking.sigmoid()).long()
    weight = (0.5 * torch.randn(views, generator=drawn) + 0.5 * click).exp()
    return {"user": user, "item": item, "tags": tags[item], "click": click, "weight": weight}


def data(users: int = 200, items: int = 150, views: int = 12_000) -> dict[str, Dataset[Any]]:
    """Five sixths to train on, one sixth held out."""
    columns = made_up(users, items, views, seed=0)
    cut = views - views // 6
    return {
        "train": Views({name: column[:cut] for name, column in columns.items()}),
        "val": Views({name: column[cut:] for name, column in columns.items()}),
    }


# --------------------------------------------------------------------------------------------------- model


class Tower(nn.Module):
    """[batch, width] to the same: what stands in the tables, and a little more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class TwoTowers(nn.Module):
    """user [batch], item [batch], tags [batch, 4] to scores [batch], logits of a click."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        self.tag = nn.EmbeddingBag(1 + TAGS, width, mode="sum", sparse=True, padding_idx=0)
        self.appeal = nn.Embedding(items, 1, sparse=True)
        self.user_tower, self.item_tower = Tower(width), Tower(width)
        self.level = nn.Parameter(torch.zeros(1))
        for table in (self.user, self.item, self.tag):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.zeros_(self.appeal.weight)

    def forward(self, user: Tensor, item: Tensor, tags: Tensor) -> Tensor:
        left = self.user_tower(self.user(user))
        right = self.item_tower(self.item(item) + self.tag(tags))
        return (left * right).sum(-1) + self.appeal(item).squeeze(-1) + self.level


def model(users: int = 200, items: int = 150, width: int = 16) -> nn.Module:
    return TwoTowers(users, items, width)


# ------------------------------------------------------------------------------------------------ learning


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(the log losses of all views, each times its weight, summed; the sum of the weights)."""
    return binary_cross_entropy_with_logits(output, batch["click"].to(output.dtype), batch["weight"])


def metrics(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    """One row for each view: kept as they are, for the whole split."""
    return {"score": output, "click": batch["click"]}


def summarize(totals: dict[str, Any]) -> dict[str, float]:
    """What no sum over batches can be; the weighted log loss is the loss itself."""
    return {"auc": auc(totals["score"], totals["click"])}


def auc(score: Tensor, click: Tensor) -> float:
    """The share of pairs of a click and a miss in which the click has the higher score; a tie is half a pair."""
    if score.isnan().any():
        return math.nan
    clicks, misses = score[click == 1], score[click == 0].sort().values
    below = torch.searchsorted(misses, clicks) + torch.searchsorted(misses, clicks, right=True)
    return float(below.sum()) / 2 / max(1, len(clicks) * len(misses))


def baselines(users: int = 200, items: int = 150, views: int = 12_000) -> dict[str, float]:
    """Each item's share of clicks among the training views as its score, and one share of clicks for all views."""
    parts = data(users, items, views)
    train, held_out = (part.columns for part in (parts["train"], parts["val"]) if isinstance(part, Views))
    shown = torch.zeros(items).index_add(0, train["item"], torch.ones(len(train["item"])))
    clicked = torch.zeros(items).index_add(0, train["item"], train["click"].float())
    rate = float((train["click"] * train["weight"]).sum() / train["weight"].sum())
    share = float((held_out["click"] * held_out["weight"]).sum() / held_out["weight"].sum())
    return {
        "auc of items' click rates": auc(((clicked + 1) / (shown + 2))[held_out["item"]], held_out["click"]),
        "loss of one click rate": -share * math.log(rate) - (1 - share) * math.log(1 - rate),
    }


def optimizer(params: Params, lr: float = 0.2, kind: str = "adagrad") -> torch.optim.Optimizer:
    """Both take sparse gradients: a row that a batch does not touch keeps its value and its state."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=10 * lr)
    if kind == "adagrad":
        torch.sparse.check_sparse_tensor_invariants.disable()  # as it is; said outright, or torch warns of it
        return torch.optim.Adagrad(params, lr=lr, initial_accumulator_value=1e-3)
    raise TaskError(f"expected kind to be adagrad or sgd, got {kind!r}")


def recipe(batch: int = 64, steps: int = 500) -> Recipe:
    return Recipe(batch=batch, steps=steps, eval_every=max(1, steps // 5), eval_batch=500, best="highest auc", seed=1)
