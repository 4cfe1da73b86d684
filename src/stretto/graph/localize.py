"""The graph of one rank: the same operations on parts of the tensors, and the messages that make them one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx, nn

from stretto.graph.axes import Axis, leaves, size
from stretto.graph.classes import picking, reduced_places
from stretto.graph.cut import Cut
from stretto.graph.reading import _argument, _each, _name
from stretto.graph.regions import NONE, Regions
from stretto.graph.stages import Stages
from stretto.state import Part

ENTER, LEAVE, DROP, NORM, WIDELY = "enter", "leave", "drop", "norm", "widely"
ROWS, CROSS_ENTROPY, LOGSUMEXP, SOFTMAX, LARGEST, PICK, COLLECT = (
    *("rows", "cross_entropy", "logsumexp", "softmax", "largest", "pick", "collect"),
)
GATHER, SCATTER, OWN = "gather", "scatter", "own"
WHOLE: Final = "whole"


@dataclass(frozen=True)
class Portion:
    """What one rank runs of the graph at a time: one stage of it, on its parts of the tensors.

    Args:
        graph: each of its nodes that stands for one of the traced graph names it in ``meta[WHOLE]``. Gives the new
            values of ``mutated``, then ``leaving``, then, of the last stage, the model's output.
        bound: its placeholders, but for the last: names in the traced graph, of parameters, buffers, constants and
            arguments.
        arriving: its last placeholders: values of other stages.
        leaving: values that other stages need.
        mutated: buffers that it changes, by name.
    """

    graph: fx.GraphModule
    bound: tuple[str, ...]
    arriving: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]
    mutated: tuple[str, ...]
    last: bool


class Localizer:
    """Rewrites the graph for ``rank`` of those that cut it inside.

    The graph calls modules that whoever runs it brings along: ``enter`` (as it is; its gradient is added up over the
    group), ``leave`` (added up over the group; its gradient as it is), ``drop`` (dropout of a part, by the numbers that
    the whole would draw), ``norm`` (batch norm by the statistics of all workers' samples), ``widely`` (a
    convolution in a lower type, not rounded yet), ``rows`` (of a part of a table, zeros for those of other ranks),
    ``collect`` (the whole of what lies in parts), and what a loss wants of classes that lie in parts:
    ``cross_entropy``, ``logsumexp``, ``softmax``, ``largest`` and ``pick``. Where values lie in parts along a sequence
    (``regions``): ``scatter`` (added up over the group, each its own part), ``gather`` (the reverse, its gradient too),
    and ``own`` (a part of what is whole, its gradient gathered).
    """

    def __init__(self, stages: Stages, cut: Cut, rank: int, regions: Regions = NONE) -> None:
        self._stages, self._cut, self._rank, self._regions = stages, cut, rank, regions
        self._along = frozenset(regions.axes.values())
        self._traced = stages.traced
        self._begin()

    def _begin(self) -> None:
        self._new = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._made: dict[tuple[str, fx.Node, Axis | None], fx.Node] = {}

    def build(self, stage: int, modules: Mapping[str, nn.Module]) -> Portion:
        """One stage; ``modules`` by name."""
        self._begin()
        stages, traced = self._stages, self._traced
        nodes, last = stages.nodes[stage], stage == stages.count - 1
        results: Any = next(node for node in traced.graph.graph.nodes if node.op == "output").args[0]
        changed, output = results[: len(traced.mutated)], results[len(traced.mutated) :] if last else []
        mutated = {name: node for name, node in zip(traced.mutated, changed, strict=True) if node in nodes}
        leaving = tuple(dict.fromkeys(n for sources in stages.incoming for n in sources.get(stage, ())))
        arriving = tuple(node for sources in stages.incoming[stage].values() for node in sources)
        used = {source for node in nodes for source in node.all_input_nodes} | {n for n in output if n is not None}
        bound = [node for node in traced.graph.graph.nodes if node.op == "placeholder" and node in used]
        for node in (*bound, *arriving):
            self._env[node] = self._new.placeholder(node.name)
        held = {}
        for node in traced.graph.graph.nodes:
            if node.op == "get_attr" and node in used:
                self._env[node] = self._new.node_copy(node)
                held[str(node.target)] = getattr(traced.graph, str(node.target))
        for node in nodes:
            self._env[node] = self._copy(node)
        for node, new in self._env.items():
            new.meta[WHOLE] = node
        given = [*map(self.whole, mutated.values()), *(self._env[node] for node in leaving)]
        self._new.output([*given, *(None if node is None else self._collected(node) for node in output)])
        graph = fx.GraphModule({**modules, **held}, self._new)
        return Portion(graph, tuple(n.name for n in bound), arriving, leaving, tuple(mutated), last)

    def _copy(self, node: fx.Node) -> fx.Node:
        axis, over = self._axis(node), self._over(node)
        if _name(node) == "batch_norm" and node.args[5]:
            given = [self.given(value, axis) for value in node.args[:5]]
            return self.module(NORM, *given, *node.args[6:8])
        if over is not None:
            return self._contract(node, over)
        if axis is None:
            partial = node in self._regions.partial
            return self._new.node_copy(node, (lambda value: self.inside(value, None)) if partial else self.whole)
        if (rewrite := _REWRITES.get(_name(node))) is not None:
            return rewrite(self, node, axis)
        return self._new.node_copy(node, lambda value: self.inside(value, axis))

    def typed(self, node: fx.Node, of: fx.Node, new: fx.Node) -> fx.Node:
        """What ``of`` is here in the type of what ``node`` gives, as autocast casts for its own operation alone."""
        one, other = of.meta["val"].dtype, node.meta["val"].dtype
        return new if one == other else self._new.call_function(torch.ops.aten.to.dtype, (new, other))

    def shape(self, node: fx.Node) -> list[int]:
        """Of a value as it lies on this rank."""
        return self.local_shape(node) if self._cut.axes else [int(size) for size in node.meta["val"].shape]

    def mean_bytes(self, node: fx.Node) -> int:
        """Of what a node of a portion gives, on average over the ranks, so that all of them reckon alike. A part of
        a sum is as large as the sum."""
        while WHOLE not in node.meta and len(node.users) == 1:
            (node,) = node.users
        whole = node.meta.get(WHOLE)
        value: Any = None if whole is None else whole.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        found = sum(one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor))
        return int(found) if whole is None or self._axis(whole) is None else int(found) // self._cut.degree

    def part_of(self, node: fx.Node) -> Part | None:
        """What of a value lies on this rank; None: all of it."""
        return self._part(node, self._rank) if self._axis(node) is not None else None

    def _part(self, node: fx.Node, rank: int) -> Part:
        return self._regions.lying(node, self._cut).part(self._cut.reading.of(node), rank)

    def whole(self, node: fx.Node) -> fx.Node:
        """A value as an operation takes it that every rank runs on all of it."""
        return self._collected(node) if node in self._regions.axes else self._env[node]

    def _collected(self, node: fx.Node) -> fx.Node:
        """Of what the graph gives all of it, on every rank."""
        if self._axis(node) is None:
            return self._env[node]
        return self._once(COLLECT, node, None, self._env[node], *self.parts(node))

    def _once(self, name: str, node: fx.Node, axis: Axis | None, *arguments: Any) -> fx.Node:
        """A call of a module that all who want the same of a value share."""
        if (name, node, axis) not in self._made:
            self._made[name, node, axis] = self.module(name, *arguments)
        return self._made[name, node, axis]

    def _axis(self, node: fx.Node) -> Axis | None:
        if not self._cut.axes or node in self._regions.axes:
            return self._regions.axes.get(node)
        for dims in _each(self._cut.reading.dims[node]):
            if (found := self._cut.axis_of(dims)) is not None:
                return found[1]
        return None

    def _over(self, node: fx.Node) -> Axis | None:
        """The cut axis that a node adds up over."""
        inner = self._cut.reading.contracted.get(node, ())
        return next((axis for axis in leaves(inner) if axis in self._cut.axes), None)

    def given(self, value: Any, axis: Axis | None) -> Any:
        """An argument of an operation as it is here; ``axis``: along which the operation is cut."""
        if not isinstance(value, fx.Node):
            return value
        return self.whole(value) if axis is None else self.inside(value, axis)

    def inside(self, node: fx.Node, axis: Axis | None) -> fx.Node:
        """A tensor as an operation on a part takes it: what is whole gets its gradient from every rank. ``axis``: of
        the part; None: of one that is whole, and its gradient is not."""
        at, dims, value = self._axis(node), self._cut.reading.dims[node], node.meta.get("val")
        if not isinstance(value, torch.Tensor) or (at is axis and axis is not None):
            return self._env[node]
        assert at is None or node in self._regions.axes, f"{node} is cut along two axes"
        if axis in self._along:
            if any(axis in leaves(dim) for dim in dims):
                return self._once(OWN, node, axis, self.whole(node), *self.parts(node, axis))
        elif at is not None:
            return self._once(GATHER, node, None, self._env[node], *self.parts(node))
        elif node in self._regions.partial:
            return self._env[node]
        new, given = self.whole(node), node.op == "placeholder" and node.name not in self._traced.parameters
        return new if given or not value.is_floating_point() else self._once(ENTER, node, axis, new)

    def leave(self, node: fx.Node, summed: fx.Node) -> fx.Node:
        """What ranks have of a node's sum, added up."""
        if node in self._regions.axes:
            return self.module(SCATTER, summed, *self.parts(node))
        return self.module(LEAVE, summed)

    def local_shape(self, node: fx.Node) -> list[int]:
        """A rank's part of a node's result."""
        cut = self._regions.lying(node, self._cut)
        return [cut.local(dim, self._rank) for dim in self._cut.reading.of(node)]

    def call(self, node: fx.Node, *arguments: Any, **keywords: Any) -> fx.Node:
        """The node's operation on other arguments."""
        return self._new.call_function(node.target, arguments, keywords)  # type: ignore[arg-type]

    def module(self, name: str, *arguments: Any) -> fx.Node:
        """A call of one of the modules."""
        return self._new.call_module(name, arguments)

    def part(self, node: fx.Node) -> tuple[list[int], int, list[tuple[int, int]]]:
        """A result's logical shape, the dimension that is cut, and this rank's pieces of it, first and last."""
        shape, dim, pieces = self.parts(node)
        return shape, dim, pieces[self._rank]

    def parts(
        self, node: fx.Node, axis: Axis | None = None
    ) -> tuple[list[int], int, list[list[tuple[int, int]]]]:
        """Likewise, with the pieces of every rank; ``axis``: along which it is to be cut, where it isn't yet."""
        cut = self._regions.lying(node, self._cut)
        if axis is not None:
            cut = Cut(cut.reading, frozenset({axis}), cut.degree)
        found = [cut.part(cut.reading.of(node), rank) for rank in range(cut.degree)]
        dim = found[0].dim
        pieces = [[(box.starts[dim], box.stops[dim]) for box in part.boxes] for part in found]
        return [int(size) for size in node.meta["val"].shape], dim, pieces

    def _contract(self, node: fx.Node, axis: Axis) -> fx.Node:
        """Each rank adds up over its part, and the group adds the sums up; a bias comes once, after that."""
        if (rewrite := _OVER.get(_name(node))) is not None:
            return rewrite(self, node, axis)
        one, two = (self.inside(value, axis) for value in node.args[:2])  # type: ignore[arg-type]
        if _name(node) in ("matmul", "bmm", "mm"):
            return self.leave(node, self.call(node, one, two))
        bias = _argument(node, 2, "bias")
        rest, low = list(node.args[3:]), node.meta["val"].dtype
        wide, own = low.itemsize < 4 and _name(node) != "linear", [one, two, None, *rest] if rest else [one, two]
        summed = self.leave(node, self.module(WIDELY, node.target, low, *own) if wide else self.call(node, *own))
        if bias is not None:
            summed = self._new.call_function(torch.ops.aten.add.Tensor, (summed, self._bias(node, bias)))
        return self._new.call_function(torch.ops.aten.to.dtype, (summed, low)) if wide else summed

    def _bias(self, node: fx.Node, bias: fx.Node) -> fx.Node:
        along = self._regions.axes.get(node)
        added = self.typed(node, bias, self.whole(bias) if along is None else self.inside(bias, along))
        if not (inner := len(self._cut.reading.of(node)) - 2) or _name(node) == "linear":
            return added
        return self._new.call_function(torch.ops.aten.view.default, (added, [-1, *[1] * inner]))  # beside [out, ...]


def _reshaped(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source: Any = node.args[0]
    return at._new.call_function(torch.ops.aten.reshape.default, (at.inside(source, axis), at.local_shape(node)))


def _expanded(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source: Any = node.args[0]
    return at.call(node, at.inside(source, axis), at.local_shape(node))


def _split(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    """Equal parts: as long as this rank's part of one is."""
    source, length = node.args[:2]
    place = int(_argument(node, 2, "dim", 0))
    one = at._cut.reading.dims[node][0]
    local = at._cut.local(one[place], at._rank)
    sizes = [local] * len(length) if isinstance(length, list | tuple) else local
    return at.call(node, at.inside(source, axis), sizes, place)  # type: ignore[arg-type]


def _chunk(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source, count = node.args[:2]
    return at.call(node, at.inside(source, axis), count, int(_argument(node, 2, "dim", 0)))  # type: ignore[arg-type]


def _dropout(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source, rate, training = node.args
    if not rate or not training:
        return at.call(node, at.inside(source, axis), rate, training)  # type: ignore[arg-type]
    shape, dim, pieces = at.part(node)
    steps = list(source.meta["val"].stride())  # type: ignore[union-attr]
    if _name(node).startswith("feature"):  # it drops whole channels
        shape = [*shape[:2], *(1 for _ in shape[2:])]
        steps = list(torch.empty(shape, device="meta").stride())
    dropped = at.module(DROP, at.inside(source, axis), rate, shape, dim, pieces, steps)  # type: ignore[arg-type]
    if not _name(node).endswith("_"):
        return dropped
    return at._new.call_function(torch.ops.aten.copy_.default, (at.inside(source, axis), dropped))  # type: ignore[arg-type]


def _convolution(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    """With as many groups as this rank has."""
    inside, keywords = [at.given(value, axis) for value in node.args], dict(node.kwargs)
    transposed, weight = _name(node).startswith("conv_transpose"), at._cut.reading.of(node.args[1])
    both = at._cut.reading.of(node if transposed else node.args[0])[1]  # groups times the weight's second dimension
    groups = at._cut.local(both, at._rank) // at._cut.local(weight[1], at._rank)
    if len(inside) > 6:
        inside[6] = groups
    elif "groups" in keywords:
        keywords["groups"] = groups
    return at.call(node, *inside, **keywords)


def _group_norm(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    """With as many groups as this rank has; each is whole."""
    source, *rest = node.args
    count: Any = rest.pop(0)
    channels = at._cut.reading.of(source)[1]
    groups = at._cut.local(channels, at._rank) * int(count) // size(channels)
    return at.call(node, at.given(source, axis), groups, *(at.given(value, axis) for value in rest))


def _picked(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source: Any = node.args[0]
    return at._new.call_function(operator.getitem, (at._env[source], node.args[1]))


def _rows(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    table, index = node.args[:2]
    padding = int(_argument(node, 2, "padding_idx", -1))
    shape, _, pieces = at.part(table)  # type: ignore[arg-type]
    found = at.module(ROWS, at._env[table], at.whole(index), padding, pieces, shape[0])  # type: ignore[index,arg-type]
    return at.leave(node, found)


def _classes(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    """A loss of logits, or of logarithms of probabilities, and classes."""
    logits, target = node.args[:2]
    weight = _argument(node, 2, "weight")
    reduction, ignored = int(_argument(node, 3, "reduction", 1)), int(_argument(node, 4, "ignore_index", -100))
    smoothing = float(_argument(node, 5, "label_smoothing", 0.0))
    shape, dim, pieces = at.part(logits)  # type: ignore[arg-type]
    classes = at.typed(node, logits, at._env[logits])  # type: ignore[index,arg-type]
    weights = None if weight is None else at.typed(node, weight, at._env[weight])
    given = classes, at._env[target], weights  # type: ignore[index]
    raw = _name(node) == "cross_entropy_loss"
    return at.module(CROSS_ENTROPY, *given, raw, reduction, ignored, smoothing, dim, pieces, shape[dim])


def _spread_softmax(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source: Any = node.args[0]
    given = at.typed(node, source, at._env[source])
    return at.module(SOFTMAX, given, int(_argument(node, 1, "dim")), _name(node) == "log_softmax")


def _spread_reduction(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    """A rank's mean counts for as much as it has of what the mean runs over."""
    source: Any = node.args[0]
    given, name = at._env[source], _name(node)
    if name in ("logsumexp", "amax"):
        keep = bool(_argument(node, 2, "keepdim", False))
        given = at.typed(node, source, given)
        return at.module(LOGSUMEXP if name == "logsumexp" else LARGEST, given, sorted(reduced_places(node)), keep)
    summed = at.call(node, given, *node.args[1:], **node.kwargs)
    if name == "mean":
        first, last = at._cut.span(axis, at._rank)
        summed = at._new.call_function(torch.ops.aten.mul.Scalar, (summed, (last - first) / axis.size))
    return at.module(LEAVE, summed)


def _spread_pick(at: Localizer, node: fx.Node, axis: Axis) -> fx.Node:
    source: Any = node.args[0]
    shape, dim, pieces = at.part(source)
    if _name(node) == "index":
        indices: Any = node.args[1]
        given = [at._env[one] for one in indices]
        return at.module(LEAVE, at.module(PICK, at._env[source], given, None, pieces, shape[dim]))
    return at.module(
        LEAVE, at.module(PICK, at._env[source], [at._env[picking(node)[1]]], dim, pieces, shape[dim])
    )


_Rewrite = Callable[[Localizer, fx.Node, Axis], fx.Node]
_REWRITES: Final[Mapping[str, _Rewrite]] = MappingProxyType(
    {
        **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
        **dict.fromkeys(("split", "split_with_sizes"), _split),
        "chunk": _chunk,
        "expand": _expanded,
        **dict.fromkeys(("dropout", "dropout_", "feature_dropout", "feature_dropout_"), _dropout),
        "getitem": _picked,
        **dict.fromkeys((f"conv{kind}{count}d" for kind in ("", "_transpose") for count in (1, 2, 3)), _convolution),
        "group_norm": _group_norm,
    }
)
_OVER: Final[Mapping[str, _Rewrite]] = MappingProxyType(
    {
        "embedding": _rows,
        **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), _classes),
        **dict.fromkeys(("softmax", "log_softmax", "_softmax"), _spread_softmax),
        **dict.fromkeys(("mean", "sum", "amax", "logsumexp"), _spread_reduction),
        **dict.fromkeys(("gather", "take_along_dim", "index"), _spread_pick),
    }
)
