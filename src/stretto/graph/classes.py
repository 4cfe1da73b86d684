"""Rules for what runs over the rows of a table or the classes of a loss: a vocabulary, which may be cut.

A row that is looked up lies on one rank, so the others add zeros to it. What a loss needs of all classes is a few
numbers for each token (their largest, the sum of their exponentials, the target's), which ranks can tell one another
without a message of the logits' size (Megatron-LM, arXiv 1909.08053, section 3, "output embedding").

The same operations inside the model need all of what they run over: a softmax over keys, or a norm's mean, would cost
messages in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from stretto.graph.axes import Dim, Dims, leaves
from stretto.graph.reading import Found, Reading, _argument, _name, _shape, _tensors, _unknown


def _embedding(found: Reading, node: fx.Node) -> Dims:
    """weight [rows, ...], index [*] -> [*, ...]."""
    weight, index = found.of(node.args[0]), found.of(node.args[1])
    found.contracted[node] = weight[0]
    if node.args[1] not in found.fed:
        # It has about as many rows as are looked up, so a sum over ranks would cost more than its part saves.
        found.block_dim(weight[0], "an embedding looks the same rows up whatever the input")
    for place, name in ((3, "scale_grad_by_freq"), (4, "sparse")):
        if _argument(node, place, name, False):
            found.block_dim(weight[0], f"an embedding with {name}=True looks its rows up")
    return index + weight[1:]


def _over(found: Reading, node: fx.Node, dim: Dim) -> None:
    """A loss may run over a part of a dimension; the model itself needs it whole."""
    if node in found.loss:
        found.contracted[node] = found.contracted.get(node, ()) + dim
    else:
        found.block_dim(dim, f"{_name(node)} runs over it")


def _softmax(found: Reading, node: fx.Node) -> Dims:
    dims = found.of(node.args[0])
    if dims:
        _over(found, node, dims[int(_argument(node, 1, "dim"))])
    return dims


def _reduced(found: Reading, node: fx.Node) -> Dims:
    """A sum, mean or extreme over some dimensions."""
    dims, keep = found.of(node.args[0]), bool(_argument(node, 2, "keepdim", False))
    places = reduced_places(node)
    for place in sorted(places):
        if _name(node) == "amin":
            found.block_dim(dims[place], "amin runs over it")
        else:
            _over(found, node, dims[place])
    return tuple(() if place in places else dim for place, dim in enumerate(dims) if keep or place not in places)


def reduced_places(node: fx.Node) -> set[int]:
    """The dimensions that a reduction runs over."""
    rank = len(_shape(node.args[0]))
    given: Any = _argument(node, 1, "dim")
    over = [given] if isinstance(given, int) else given or range(rank)  # none named: all
    return {place % max(1, rank) for place in over}


def _cross_entropy(found: Reading, node: fx.Node) -> Found:
    """logits [tokens, classes, ...] or [classes], target [tokens, ...]; also of what are logarithms already."""
    logits, target, reduction = node.args[0], node.args[1], int(_argument(node, 3, "reduction", 1))
    if target.meta["val"].is_floating_point():  # type: ignore[union-attr]
        return _unknown(found, node)  # a weight for each class, as large as the logits
    dims, others = found.of(logits), found.of(target)
    place = class_place(node)
    found.contracted[node] = dims[place]
    rest = dims[:place] + dims[place + 1 :]
    for one, other in zip(rest, others, strict=True):
        if leaves(one):
            found.axes.same(one, other)
    weight = _argument(node, 2, "weight")
    if weight is not None:
        found.block(found.of(weight), "a loss weighs classes by it")
    if not reduction:
        return rest
    found.block(rest, f"{_name(node)} runs over it")
    return ()


def class_place(node: fx.Node) -> int:
    """The dimension of the classes in a loss's first argument."""
    return 0 if len(_shape(node.args[0])) == 1 else 1


def picking(node: fx.Node) -> tuple[int, fx.Node]:
    """Of ``gather`` and ``take_along_dim`` the dimension along which they pick, and the index."""
    dim, index = (1, 2) if _name(node) == "gather" else (2, 1)
    picked: Any = _argument(node, index, "index" if _name(node) == "gather" else "indices")
    given: Any = _argument(node, dim, "dim")
    return int(given) % max(1, len(_shape(node.args[0]))), picked


def _gather(found: Reading, node: fx.Node) -> Found:
    """x [..., classes, ...], index [..., picked, ...]."""
    if node not in found.loss or not _shape(node.args[0]) or (_name(node) != "gather" and len(node.args) < 3):
        return _unknown(found, node)
    place, picked = picking(node)
    source, index = found.of(node.args[0]), found.of(picked)
    sizes, wanted = _shape(node.args[0]), _shape(picked)
    if any(one != other for at, (one, other) in enumerate(zip(sizes, wanted, strict=True)) if at != place):
        return _unknown(found, node)
    for at, (dim, other) in enumerate(zip(source, index, strict=True)):
        if at != place:
            found.axes.same(dim, other)
    found.contracted[node] = source[place]
    found.block_dim(index[place], f"{_name(node)} picks by it")
    return index


def _index(found: Reading, node: fx.Node) -> Found:
    """``x[rows, target]``: by numbers alone, one index for each dimension, the last of them the classes."""
    indices: Any = node.args[1]
    dims = found.of(node.args[0])
    whole = len(indices) == len(dims) and all(one is not None for one in indices)
    if node not in found.loss or not whole or any(one.meta["val"].dtype is torch.bool for one in indices):
        return _unknown(found, node)
    for dim in dims[:-1]:
        found.block_dim(dim, "index picks from it")
    for one in _tensors((indices,)):
        found.block(found.of(one), "index picks by it")
    found.contracted[node] = dims[-1]
    return found.axes.dims(_shape(node), "index picks by it")


CLASSES: Final[Mapping[str, Callable[[Reading, fx.Node], Found]]] = MappingProxyType(
    {
        "embedding": _embedding,
        **dict.fromkeys(("softmax", "log_softmax", "_softmax"), _softmax),
        **dict.fromkeys(("mean", "sum", "amax", "amin", "logsumexp"), _reduced),
        **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), _cross_entropy),
        **dict.fromkeys(("gather", "take_along_dim"), _gather),
        "index": _index,
    }
)
