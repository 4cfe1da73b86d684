"""What each operation says of its tensors' axes: which are the same, and which it needs whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from stretto.graph.axes import Dims, leaves, size
from stretto.graph.classes import CLASSES
from stretto.graph.reading import Found, Reading, _argument, _each, _name, _shape, _shapes, _tensors, _unknown
from stretto.graph.spatial import RUNNING, SPATIAL, normalizes
from stretto.graph.trace import Traced


def whole_output(unscored: str = "") -> str:
    """Why the model's output is needed whole; ``unscored``: why the loss wasn't traced with it."""
    return "it is in the model's output" + (f" ({unscored})" if unscored else "")


def read(traced: Traced, output: str = "it is in the model's output") -> Reading:
    """Goes through the graph once. ``output``: why what it gives is needed whole; empty: it isn't, as its parts are
    gathered."""
    found = Reading(loss=traced.loss or frozenset(), fed=_fed(traced))
    known: dict[str, Dims] = {}
    names = {**traced.parameters, **traced.buffers}
    used = {names.get(node.name) for node in traced.graph.graph.nodes if node.users}
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder":
            name = names.get(node.name)
            dims = found.dims[node] = known.get(name or "") or _placeholder(found, node, traced)
            if name is not None:
                known[name] = dims  # a tied one has the same axes wherever it stands
                if name not in used:
                    found.block(dims, "forward doesn't use it")
        elif node.op == "call_function":
            found.dims[node] = _RULES.get(_name(node), _by_tag)(found, node)
        elif node.op == "output":
            for value in _tensors(node.args):
                for dims in _each(found.dims[value]):
                    found.block(dims, output)
        else:
            found.dims[node] = found.axes.dims(_shape(node), f"{node.op} {node.target}")
    return found


def _fed(traced: Traced) -> frozenset[fx.Node]:
    """What depends on the model's input, and not on its shape alone."""
    found: set[fx.Node] = set()
    for node in traced.graph.graph.nodes:
        if node.name in traced.arguments or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _placeholder(found: Reading, node: fx.Node, traced: Traced) -> Dims:
    if node.name in traced.parameters:
        return found.axes.dims(_shape(node))
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return ()
    if node.name in traced.buffers and all(normalizes(user) and node in user.args[RUNNING] for user in node.users):
        return found.axes.dims(_shape(node))
    return found.axes.dims(_shape(node), "it is in the model's input, or in a buffer")


# ---- rules


def _by_tag(found: Reading, node: fx.Node) -> Found:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return _pointwise(found, node)
    return _unknown(found, node)


def _pointwise(found: Reading, node: fx.Node) -> Dims:
    """Element by element, sizes of 1 repeated."""
    out = list(found.axes.dims(_shape(node)))
    for value in _tensors((node.args, node.kwargs)):
        for place, dim in enumerate(reversed(found.of(value)), 1):
            if leaves(dim):
                found.axes.same(out[-place], dim)
    return tuple(out)


def _as_it_is(found: Reading, node: fx.Node) -> Dims:
    return found.of(node.args[0])


def _view(found: Reading, node: fx.Node) -> Dims:
    """The same elements in the same order."""
    out = found.axes.dims(_shape(node))
    if 0 in _shape(node):
        return _unknown(found, node)  # type: ignore[return-value]
    before = tuple(axis for dim in found.of(node.args[0]) for axis in dim)
    found.axes.same(before, tuple(axis for dim in out for axis in dim))
    return out


def _permute(found: Reading, node: fx.Node) -> Dims:
    dims = found.of(node.args[0])
    order: Any = node.args[1]
    return tuple(dims[place] for place in order)


def _transpose(found: Reading, node: fx.Node) -> Dims:
    dims = list(found.of(node.args[0]))
    if len(dims) > 1:
        one, other = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
        dims[one], dims[other] = dims[other], dims[one]  # type: ignore[index]
    return tuple(dims)


def _expand(found: Reading, node: fx.Node) -> Dims:
    out, dims = list(found.axes.dims(_shape(node))), found.of(node.args[0])
    for place, dim in enumerate(reversed(dims), 1):
        if leaves(dim):
            out[-place] = dim
    return tuple(out)


def _along(found: Reading, node: fx.Node) -> Dims:
    """Picks or pads along one dimension, and leaves the others."""
    dims, shape = found.of(node.args[0]), _shape(node)
    place = int(_argument(node, 1, "dim", 0)) % max(1, len(dims))
    why = f"{_name(node)} picks from it"
    if _name(node) == "select":
        found.block_dim(dims[place], why)
        return dims[:place] + dims[place + 1 :]
    if shape == _shape(node.args[0]):  # all of it
        return dims
    found.block_dim(dims[place], why)
    new = found.axes.dims((shape[place],), why)
    return dims[:place] + new + dims[place + 1 :]


def _parts(found: Reading, node: fx.Node) -> Found:
    """Equal parts along a dimension: that was parts times one part."""
    dims, shapes = found.of(node.args[0]), _shapes(node)
    by_number = _name(node) in ("unbind",)
    place = int(_argument(node, 1 if by_number else 2, "dim", 0)) % len(dims)
    if by_number:
        found.block_dim(dims[place], "unbind picks from it")
        return tuple(dims[:place] + dims[place + 1 :] for _ in shapes)
    sizes = {shape[place] for shape in shapes}
    if len(sizes) != 1:
        return _unknown(found, node)
    count, part = found.axes.dims((len(shapes),), "a split picks from it"), found.axes.dims((sizes.pop(),))
    found.axes.same(dims[place], count[0] + part[0])
    return tuple(dims[:place] + part + dims[place + 1 :] for _ in shapes)


def _cat(found: Reading, node: fx.Node) -> Dims:
    """Laid one after another along one dimension, which is then needed whole."""
    every = [found.of(value) for value in _tensors((node.args[0],))]
    place, shape = int(_argument(node, 1, "dim", 0)) % max(1, len(_shape(node))), _shape(node)
    out = list(found.axes.dims(shape))
    if _name(node) == "stack":
        every = [(*dims[:place], out[place], *dims[place:]) for dims in every]
    for dims in every:
        for at, dim in enumerate(dims):
            if at != place:
                found.axes.same(out[at], dim)
            else:
                found.block_dim(dim, f"{_name(node)} lays it beside another")
    found.block_dim(out[place], f"{_name(node)} lays it beside another")
    return tuple(out)


def _getitem(found: Reading, node: fx.Node) -> Found:
    source: Any = node.args[0]
    picked: Any = node.args[1]
    return found.dims[source][picked]  # type: ignore[no-any-return]


def _linear(found: Reading, node: fx.Node) -> Dims:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    x, weight = found.of(node.args[0]), found.of(node.args[1])
    found.axes.same(x[-1], weight[-1])
    found.contracted[node] = weight[-1]
    bias = _argument(node, 2, "bias")
    if bias is not None:
        found.axes.same(found.of(bias)[0], weight[0])
    return x[:-1] + weight[:1]


def _matmul(found: Reading, node: fx.Node) -> Dims:
    left, right = found.of(node.args[0]), found.of(node.args[1])
    if min(len(left), len(right)) < 2:
        return _unknown(found, node)  # type: ignore[return-value]
    found.axes.same(left[-1], right[-2])
    found.contracted[node] = left[-1]
    out = list(found.axes.dims(_shape(node)[:-2]))
    for dims in (left[:-2], right[:-2]):
        for place, dim in enumerate(reversed(dims), 1):
            if leaves(dim):
                found.axes.same(out[-place], dim)
    return (*out, left[-2], right[-1])


def _attention(found: Reading, node: fx.Node) -> Dims:
    """query [..., heads, length, width], key and value [..., heads, other length, width]."""
    query, key, value = (found.of(argument) for argument in node.args[:3])
    why = "attention looks at all of it"
    for dim in (*query[-2:], *key[-2:]):
        found.block_dim(dim, why)
    found.axes.same(key[-2], value[-2])
    found.axes.same(query[-1], key[-1])
    for one, two, three in zip(query[:-2], key[:-2], value[:-2], strict=True):
        found.axes.same(two, three)
        inner = found.axes.dims((size(one) // size(two),), "query heads that share a key")  # with enable_gqa
        found.axes.same(one, two + inner[0])
    mask = _argument(node, 3, "attn_mask")
    if mask is not None:
        for place, dim in enumerate(reversed(found.of(mask)), 1):
            if leaves(dim) and place > 2:
                found.axes.same(query[-place], dim)
    if float(_argument(node, 4, "dropout_p", 0.0)):
        found.block(query, "attention drops at random inside")
    return (*query[:-1], value[-1])


def _norm(found: Reading, node: fx.Node) -> Dims:
    dims = found.of(node.args[0])
    shape: Any = node.args[1]
    for dim in dims[-len(shape) :]:
        found.block_dim(dim, "a norm runs over it")
    for place in (2, 3):
        other = _argument(node, place, ("weight", "bias")[place - 2])
        if isinstance(other, fx.Node):
            found.block(found.of(other), "a norm runs over it")
    return dims


def _nothing(found: Reading, node: fx.Node) -> Dims:
    return ()


_SAME: Final[Sequence[str]] = ("dropout", "to", "alias", "clone", "contiguous", "detach", "_to_copy", "dropout_")
_UNTAGGED: Final[Sequence[str]] = ("relu6_", "hardswish", "hardswish_", "mish_", "log_sigmoid")  # torch tags all others
_RULES: Final[Mapping[str, Callable[[Reading, fx.Node], Found]]] = MappingProxyType(
    {
        **dict.fromkeys(_SAME, _as_it_is),
        **dict.fromkeys(_UNTAGGED, _pointwise),
        **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), _view),
        **dict.fromkeys(("select", "slice", "narrow"), _along),
        **dict.fromkeys(("split", "chunk", "unbind", "split_with_sizes"), _parts),
        **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
        **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
        **SPATIAL,
        **dict.fromkeys(("cat", "stack"), _cat),
        "permute": _permute,
        "transpose": _transpose,
        "t": _transpose,
        "expand": _expand,
        "getitem": _getitem,
        "linear": _linear,
        "scaled_dot_product_attention": _attention,
        **CLASSES,
    }
)
