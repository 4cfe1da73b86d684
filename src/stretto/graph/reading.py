"""What is known of a graph's axes while it is read, and how its operations' arguments are looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stretto.graph.axes import Axes, Dim, Dims

Found = Dims | tuple[Dims, ...]


@dataclass
class Reading:
    """The axes of every tensor in a graph.

    Args:
        dims: node -> its dimensions; of a node that gives several tensors, those of each.
        contracted: nodes that add up over axes, and over which.
        loss: the operations of the loss, where it is in the graph.
        fed: the nodes whose values depend on those of the model's input.
    """

    axes: Axes = field(default_factory=Axes)
    dims: dict[fx.Node, Any] = field(default_factory=dict)
    contracted: dict[fx.Node, Dim] = field(default_factory=dict)
    loss: frozenset[fx.Node] = frozenset()
    fed: frozenset[fx.Node] = frozenset()

    def of(self, node: Any) -> Dims:
        """A tensor's dimensions."""
        found: Dims = self.dims[node]
        return found

    def block(self, dims: Dims, why: str) -> None:
        """Every axis of a tensor is needed whole."""
        for dim in dims:
            self.block_dim(dim, why)

    @staticmethod
    def block_dim(dim: Dim, why: str) -> None:
        """Every axis of a dimension is needed whole."""
        for axis in dim:
            axis.block(why)


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(int(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return [tuple(map(int, one.shape)) for one in values if isinstance(one, torch.Tensor)]


def _tensors(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return [node for node in found if "val" in node.meta]


def _each(dims: Any) -> list[Dims]:
    """One for each tensor that a node gives."""
    several = bool(dims) and isinstance(dims[0], tuple) and bool(dims[0]) and isinstance(dims[0][0], tuple)
    return list(dims) if several else [dims]


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _unknown(found: Reading, node: fx.Node) -> Found:
    """Nothing is known of it, so it needs all of everything."""
    why = f"{_name(node)} needs all of it"
    for value in _tensors((node.args, node.kwargs)):
        for dims in _each(found.dims[value]):
            found.block(dims, why)
    if isinstance(node.meta.get("val"), list | tuple):
        return tuple(found.axes.dims(shape, why) for shape in _shapes(node))
    return found.axes.dims(_shape(node), why)
