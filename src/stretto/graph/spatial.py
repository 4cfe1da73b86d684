"""What the operations of convolutional networks say of their tensors' axes: x [batch, channels, ...space].

Space is needed whole, as a neighbour looks at its neighbour. Channels mostly keep to themselves: where they fall into
groups (a grouped convolution, a group norm), no group looks into another, so groups can be cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import fx

from stretto.graph.axes import Dims, size
from stretto.graph.reading import Found, Reading, _argument, _name, _shape, _shapes, _unknown

RUNNING: Final = slice(3, 5)  # the arguments of a norm that are its running mean and variance


def normalizes(node: fx.Node) -> bool:
    """Whether it takes each channel for itself, by statistics of it that may be running ones."""
    return _name(node) in ("batch_norm", "instance_norm")


def _convolution(found: Reading, node: fx.Node) -> Found:
    """x [batch, in, ...], weight [out, in / groups, ...] -> [batch, out, ...]."""
    x, weight = found.of(node.args[0]), found.of(node.args[1])
    if len(x) != len(weight):
        return _unknown(found, node)
    count = int(_argument(node, 6, "groups", 1))
    groups, out = found.axes.dims((count, size(weight[0]) // count))
    found.axes.same(x[1], groups + weight[1])
    found.axes.same(weight[0], groups + out)
    found.contracted[node] = weight[1]
    return _over_space(found, node, x, weight, groups + out)


def _transposed(found: Reading, node: fx.Node) -> Found:
    """x [batch, in, ...], weight [in, out / groups, ...] -> [batch, out, ...]."""
    x, weight = found.of(node.args[0]), found.of(node.args[1])
    if len(x) != len(weight):
        return _unknown(found, node)
    count = int(_argument(node, 6, "groups", 1))
    groups, inside = found.axes.dims((count, size(weight[0]) // count))
    found.axes.same(x[1], weight[0])
    found.axes.same(weight[0], groups + inside)
    found.contracted[node] = inside
    return _over_space(found, node, x, weight, groups + weight[1])


def _over_space(found: Reading, node: fx.Node, x: Dims, weight: Dims, out: tuple[Any, ...]) -> Dims:
    bias, why = _argument(node, 2, "bias"), "a convolution runs over it"
    if bias is not None:
        found.axes.same(found.of(bias)[0], out)
    found.block((*x[2:], *weight[2:]), why)
    return (x[0], out, *found.axes.dims(_shape(node)[2:], why))


def _each_channel(found: Reading, node: fx.Node) -> Dims:
    """A norm of each channel by itself; weight, bias and running statistics [channels]."""
    x = found.of(node.args[0])
    for value in node.args[1:5]:
        if value is not None:
            found.axes.same(found.of(value)[0], x[1])
    batch = x[:1] if _name(node) == "batch_norm" else ()
    found.block((*batch, *x[2:]), f"{_name(node)} runs over it")
    return x


def _group_norm(found: Reading, node: fx.Node) -> Dims:
    """x [batch, groups times channels of one, ...], weight and bias [channels]."""
    x, count = found.of(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
    groups, within = found.axes.dims((count, size(x[1]) // count))
    found.axes.same(x[1], groups + within)
    found.block((within, *x[2:]), "a group norm runs over it")
    for place in (2, 3):
        value = _argument(node, place, ("weight", "bias")[place - 2])
        if value is not None:
            found.axes.same(found.of(value)[0], x[1])
    return x


def _pool(found: Reading, node: fx.Node) -> Found:
    """[..., space] to other sizes of space; with its places, where it gives them."""
    count, why = int(re.findall(r"(\d)d", _name(node))[-1]), f"{_name(node)} runs over it"
    x = found.of(node.args[0])
    found.block(x[-count:], why)
    each = tuple((*x[:-count], *found.axes.dims(shape[-count:], why)) for shape in _shapes(node))
    return each if isinstance(node.meta.get("val"), list | tuple) else each[0]


def _pad(found: Reading, node: fx.Node) -> Dims:
    """By pairs of widths, those of the last dimension first."""
    dims, shape, why = list(found.of(node.args[0])), _shape(node), "padding is laid beside it"
    widths: Any = node.args[1]
    for place in range(1, len(widths) // 2 + 1):
        if any(widths[2 * place - 2 : 2 * place]):
            found.block_dim(dims[-place], why)
            dims[-place] = found.axes.dims((shape[-place],), why)[0]
    return tuple(dims)


def _shuffle(found: Reading, node: fx.Node) -> Dims:
    """Channels times squares of pixels, to channels and longer sides of space; or back."""
    x, shape, why = found.of(node.args[0]), _shape(node), "pixels are shuffled over it"
    before, after = size(x[-3]), shape[-3]
    found.block(x[-2:], why)
    channels, square = found.axes.dims((min(before, after), max(before, after) // min(before, after)))
    found.block_dim(square, why)
    found.axes.same(x[-3], channels + square if before > after else channels)
    return (*x[:-3], channels if before > after else channels + square, *found.axes.dims(shape[-2:], why))


def _prelu(found: Reading, node: fx.Node) -> Dims:
    """weight: one for all, or one for each channel."""
    x, weight = found.of(node.args[0]), found.of(node.args[1])
    if weight and weight[0]:
        found.axes.same(weight[0], x[1] if len(x) > 1 else x[0])
    return x


def _feature_dropout(found: Reading, node: fx.Node) -> Dims:
    """Whole channels at zero."""
    x = found.of(node.args[0])
    found.block(x[2:], "channels are dropped as a whole")
    return x


_SIZED: Final = (
    *(f"{kind}_pool{count}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for count in (1, 2, 3)),
    *(f"max_pool{count}d_with_indices" for count in (2, 3)),
    *(f"upsample_nearest{count}d" for count in (1, 2, 3)),
    *(f"_upsample_nearest_exact{count}d" for count in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
)
SPATIAL: Final[Mapping[str, Callable[[Reading, fx.Node], Found]]] = MappingProxyType(
    {
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
        **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
        **dict.fromkeys(("batch_norm", "instance_norm"), _each_channel),
        **dict.fromkeys(_SIZED, _pool),
        **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffle),
        **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
        "group_norm": _group_norm,
        "prelu": _prelu,
        **dict.fromkeys(("feature_dropout", "feature_dropout_"), _feature_dropout),
    }
)
