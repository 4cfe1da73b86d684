"""What an operation of a traced graph does beside giving a value: which tensors it changes, whether it draws.

Operations under ``no_grad`` or ``autocast`` stand in a graph of their own, which one operation of the outer one runs:
what they do, that one does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

_WRITES_UNSAID: Final = MappingProxyType(
    {"aten::batch_norm": (3, 4), "aten::instance_norm": (3, 4)}
)  # running statistics, where it trains


def written_in(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What is changed in place, by the operation (or placeholder) that made it; and what changes it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for target in writes(node):
            found.setdefault(base_of(target), []).append(node)
    return found


def base_of(node: fx.Node) -> fx.Node:
    """Where the memory of a view comes from."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
            continue
        schema = getattr(node.target, "_schema", None)
        shown = {name for one in getattr(schema, "returns", ()) if one.alias_info for name in one.alias_info.before_set}
        source = None
        for at, argument in enumerate(getattr(schema, "arguments", ())):
            if argument.alias_info is not None and shown & set(argument.alias_info.before_set):
                source = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        if not isinstance(source, fx.Node):
            return node
        node = source
    return node


def written_arguments(schema: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that an operator of that schema changes."""
    return [
        (at, one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


def writes(node: fx.Node) -> list[fx.Node]:
    """The values that an operation changes."""
    if node.op != "call_function":
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(dict.fromkeys(_written_inside(node)))
    places = [at for at, _ in written_arguments(schema)]
    if schema.name in _WRITES_UNSAID and node.args[5]:
        places += _WRITES_UNSAID[schema.name]
    found = []
    for at in places:
        value = node.args[at] if at < len(node.args) else node.kwargs.get(schema.arguments[at].name)
        found += [value] if isinstance(value, fx.Node) else []
    return found


def draws_in(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    if any(draws_in(one) for graph, _ in inner_graphs(node) for one in graph.graph.nodes):
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name, arguments = schema_name(node), [*node.args, *node.kwargs.values()]
    if name.removesuffix("_") in ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"):
        return bool(arguments[1]) and bool(arguments[2])
    if name == "aten::scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if name in ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"):
        return bool(node.args[5]) and bool(node.args[6])
    return True


def schema_name(node: fx.Node) -> str:
    """``aten::add``, say; nothing for what torch has no schema of."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def inner_graphs(node: fx.Node) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    """The graphs that an operation runs, and what it gives them."""
    if node.op != "call_function":
        return
    given: list[fx.Node] = []  # each as often as it is given
    fx.map_arg(node.args, lambda one: given.append(one) or one)  # type: ignore[func-returns-value]
    held = [one for one in given if one.op == "get_attr"]
    values = [one for one in given if one.op != "get_attr"]
    for one in held:
        graph = getattr(node.graph.owning_module, str(one.target), None)
        if isinstance(graph, fx.GraphModule):
            yield graph, values


def _written_inside(node: fx.Node) -> Iterator[fx.Node]:
    for graph, values in inner_graphs(node):
        inside = [one for one in graph.graph.nodes if one.op == "placeholder"]
        outside = dict(zip(inside, values, strict=False))
        for base in written_in(graph.graph.nodes):
            if base in outside:
                yield base_of(outside[base])
