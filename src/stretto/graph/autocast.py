"""What autocast does to the types in a traced graph.

It leaves no operation there: a graph that is traced under it has the types that it chose, and chooses them again
where it runs under it. But a trace computes with tensors that have no numbers. Of an LSTM torch runs those step by
step, where real ones go to oneDNN's on a CPU, which gives another type under autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves, tree_map_only

from stretto.graph.effects import schema_name

if TYPE_CHECKING:
    from stretto.graph.trace import Traced

_UNTOLD: Final = torch.ops.aten.lstm.input
_AS_THEY_ARE: Final = frozenset(f"aten::{one}_norm" for one in ("layer", "group", "batch", "instance", "rms"))
_DROPOUT: Final = 5  # the place of its rate among the arguments


def settle_types(graph: fx.GraphModule) -> None:
    """Notes at each operation what it gives for real tensors. It is to be called under what surrounds the graph."""
    nodes = graph.graph.nodes
    if any(node.target is _UNTOLD for node in nodes):
        given = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
        mode = next(one.fake_mode for one in given if isinstance(one, torch.Tensor))  # type: ignore[attr-defined]
        _Settled(graph, mode).propagate_dont_convert_inputs(*given)


def cast_apart(traced: Traced, of: Mapping[fx.Node, int]) -> set[str]:
    """Parameters that are cast in several stages, where one device casts them once, and adds the gradients of all uses
    of that copy in its lower type.

    Args:
        of: of each operation that belongs to one stage, which.
    """
    stages: dict[str, set[int]] = {}
    for node, stage in of.items() if traced.autocast else ():
        for source in node.all_input_nodes:
            if source.name in traced.parameters and _casts(node, source):
                stages.setdefault(traced.parameters[source.name], set()).add(stage)
    return {name for name, found in stages.items() if len(found) > 1}


def _casts(node: fx.Node, parameter: fx.Node) -> bool:
    """Whether an operation gets a parameter in the lower type that it gives. What torch promotes isn't cast, and norms
    take weights as they are."""
    if schema_name(node) in _AS_THEY_ARE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return False
    found = [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
    return any(one.is_floating_point() and one.itemsize < parameter.meta["val"].itemsize for one in found)


class _Settled(FakeTensorProp):
    def __init__(self, graph: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(graph, mode)
        self._fake = mode

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Of what a trace doesn't tell zeros are asked; without dropout, so that nothing is drawn."""
        if target is not _UNTOLD:
            return super().call_function(target, args, dict(kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            real = list(tree_map_only(torch.Tensor, _zeros, args))
            real[_DROPOUT] = 0.0
            found = target(*real)
        return tree_map_only(torch.Tensor, self._fake.from_tensor, found)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
