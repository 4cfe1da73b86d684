"""A batch is any tree: tensors in whatever containers a task's ``collate`` returns."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

_LEAVES: Final = (str, bytes, int, float, type, type(None))  # the most frequent of those without an inside


def to_device(tree: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """The same tree with its tensors on ``device`` and, where ``floating`` is given, real floats of that type.

    Walked are tuples, named tuples, lists, mappings and dataclasses; each comes back as the type that it was, or as
    the plain tuple, list or dict where its own type can't be built from new values. Where nothing in it has to move,
    the very same object comes back. A ``PackedSequence``, and what else has a ``to`` of its own, moves itself;
    anything unknown is passed on as it is.
    """

    def other(node: Any) -> Any:
        if isinstance(node, PackedSequence):
            moved = _moved(node.data, device, floating)
            sequence: Any = node  # torch's types know only some ways to call it
            return node if moved is node.data else sequence.to(device=device, dtype=moved.dtype)
        # A dataset's objects are on the host, so there they are left alone: ``to`` may mean anything.
        return node.to(device) if device.type != "cpu" and callable(getattr(node, "to", None)) else node

    return mapped(tree, lambda tensor: _moved(tensor, device, floating), other)


def mapped(
    tree: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] = lambda node: node
) -> Any:
    """The same tree with ``change`` of its tensors, in its order, and ``other`` of what is neither tensor, plain value
    nor container. Containers and their types are as :func:`to_device` says."""

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return change(node)
        if isinstance(node, _LEAVES):
            return node
        if isinstance(node, PackedSequence):
            return other(node)
        if isinstance(node, list | tuple):
            parts = [walk(value) for value in node]
            return node if all(map(operator.is_, parts, node)) else _sequence(node, parts)
        if isinstance(node, Mapping):
            return _entries(node, node, walk, _mapping)
        if dataclasses.is_dataclass(node):
            values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
            return _entries(node, values, walk, _dataclass)
        return other(node)

    return walk(tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(tree, note)
    yield from found


def _moved(tensor: torch.Tensor, device: torch.device, floating: torch.dtype | None) -> torch.Tensor:
    dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
    moved = tensor.to(device=device, dtype=dtype)
    if moved is not tensor and type(tensor) is not torch.Tensor:
        for name, value in tensor.__dict__.items():  # what a subclass carries beside its numbers
            moved.__dict__.setdefault(name, value)
    return moved


def _entries(
    node: Any, values: Mapping[Any, Any], walk: Callable[[Any], Any], build: Callable[[Any, dict[Any, Any]], Any]
) -> Any:
    walked = {key: walk(value) for key, value in values.items()}
    return node if all(map(operator.is_, walked.values(), values.values())) else build(node, walked)


def _mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A copy that keeps what else the object holds (a default factory, an encoding), else one made of the values."""
    if type(node) is dict:
        return values
    try:
        made: Any = copy.copy(node)
        for key, value in values.items():
            made[key] = value
        return made
    except Exception:
        return _as_type(node, values, values)


def _sequence(node: Any, parts: list[Any]) -> Any:
    if hasattr(node, "_fields"):
        return type(node)._make(parts)
    return _as_type(node, parts, parts if isinstance(node, list) else tuple(parts))


def _dataclass(node: Any, values: dict[str, Any]) -> Any:
    made = copy.copy(node)  # neither __init__ nor __post_init__ runs anew
    for name, value in values.items():
        object.__setattr__(made, name, value)  # a frozen one too
    return made


def _as_type(node: Any, values: Iterable[Any], plain: Any) -> Any:
    try:
        return type(node)(values)
    except Exception:  # its constructor wants something else, and may say so in any way
        return plain
