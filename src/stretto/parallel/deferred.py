"""Weight gradients made later than those of the inputs (zero bubble, arXiv 2401.10241, section 2).

Where a schedule splits backward, the layers that cost most, linear ones and convolutions, give their inputs' gradients
at once and put what makes their weights' on a list, to be worked off when the rank would wait. All other layers make
both at once: their weights are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import fx, nn

Made = tuple[torch.Tensor, torch.Tensor]  # a weight, and its gradient
_CONVOLUTIONS: Final = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)


class Deferred:
    """What is put off while the list is open."""

    def __init__(self) -> None:
        self._open: list[Callable[[], list[Made]]] | None = None

    def collect(self, backward: Callable[[], None]) -> list[Callable[[], list[Made]]]:
        """Runs ``backward``; returns what it put off."""
        found: list[Callable[[], list[Made]]] = []
        self._open = found
        try:
            backward()
        finally:
            self._open = None
        return found

    def put_off(self, make: Callable[[], list[Made]]) -> bool:
        """Whether it is put off; else it is to be made now."""
        if self._open is not None:
            self._open.append(make)
        return self._open is not None


def work_off(put_off: list[Callable[[], list[Made]]]) -> None:
    """Makes the gradients, and adds them at their weights as autograd does."""
    made = [pair for make in put_off for pair in make()]
    if made:
        torch.autograd.backward([weight for weight, _ in made], [gradient for _, gradient in made])


def defer(graph: fx.GraphModule, weights: set[str], deferred: Deferred) -> None:
    """Lets the layers of ``graph`` whose weight is one of these placeholders put its gradient off."""
    for kind, layer in (("linear", _Linear), ("convolution", _Convolution)):
        graph.add_submodule(f"{kind}_deferred", layer(deferred, alone=True))
        graph.add_submodule(f"{kind}_together", layer(deferred, alone=False))
    for node in list(graph.graph.nodes):
        of = node.args[1] if node.op == "call_function" and len(node.args) > 1 else None
        if not isinstance(of, fx.Node) or of.name not in weights or node.kwargs:
            continue
        how = "deferred" if len(of.users) == 1 else "together"
        with graph.graph.inserting_before(node):
            if node.target is torch.ops.aten.linear.default:
                new = graph.graph.call_module(f"linear_{how}", node.args)
            elif node.target in _CONVOLUTIONS:
                new = graph.graph.call_module(f"convolution_{how}", node.args)
            else:
                continue
        new.meta = node.meta
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()


class _Layer(nn.Module):
    """
    Args:
        alone: it is the only one with its weight.
    """

    def __init__(self, deferred: Deferred, alone: bool) -> None:
        super().__init__()
        self._deferred, self._alone = deferred, alone

    def plain(self, x: torch.Tensor) -> bool:
        """Whether torch's own layer is to run. Autocast casts a weight once and adds its gradients up in the lower
        type; put off, each would be rounded to the weight's."""
        return not self._alone and torch.is_autocast_enabled(x.device.type)


def _cast(x: torch.Tensor, *weights: torch.Tensor | None) -> list[torch.Tensor | None]:
    """As autocast, where it is on, casts what it gives to a layer."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return [x, *weights]
    dtype = torch.get_autocast_dtype(device)
    return [one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in (x, *weights)]


class _Linear(_Layer):

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]."""
        if self.plain(x):
            return torch.nn.functional.linear(x, weight, bias)
        return cast(torch.Tensor, _LinearFunction.apply(*_cast(x, weight, bias), self._deferred))  # type: ignore[no-untyped-call]


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferred: Deferred
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors[0], ctx.weight  # where hooks are, a saved leaf comes back as another
        bias: torch.Tensor | None = ctx.bias
        rows = gradient.reshape(-1, gradient.shape[-1])

        def make() -> list[Made]:
            found = []
            if weight.requires_grad:
                found.append((weight, rows.t() @ x.reshape(-1, x.shape[-1])))
            if bias is not None and bias.requires_grad:
                found.append((bias, rows.sum(0)))
            return found

        back = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.deferred.put_off(make):
            return back, None, None, None
        made = {id(one): value for one, value in make()}
        return back, made.get(id(weight)), made.get(id(bias)), None


class _Convolution(_Layer):

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: list[int] | int = 1,
        padding: list[int] | int = 0,
        dilation: list[int] | int = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """As aten's convolutions; x [batch, in, ...], weight [out, in / groups, ...]."""
        spatial = weight.dim() - 2
        sizes = [[one] * spatial if isinstance(one, int) else list(one) for one in (stride, padding, dilation)]
        how = tuple(size * spatial if len(size) < spatial else size for size in sizes)
        if self.plain(x):
            stride, padding, dilation = how
            return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * spatial, groups)
        found = _ConvolutionFunction.apply(*_cast(x, weight, bias), how, groups, self._deferred)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, found)


class _ConvolutionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: tuple[list[int], ...],
        groups: int,
        deferred: Deferred,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.how, ctx.groups, ctx.deferred = weight, bias, how, groups, deferred
        stride, padding, dilation = how
        none = [0] * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors[0], ctx.weight
        bias: torch.Tensor | None = ctx.bias
        sizes = None if bias is None else [bias.shape[0]]
        none = [0] * len(ctx.how[0])

        def parts(*wanted: bool) -> tuple[Any, ...]:
            # The weight's own gradient doesn't need the weight, which may not be there any more (zero=3).
            like = weight if wanted[0] else torch.empty_like(weight)
            found: tuple[Any, ...] = torch.ops.aten.convolution_backward(
                gradient, x, like, sizes, *ctx.how, False, none, ctx.groups, list(wanted)
            )
            return found

        def make() -> list[Made]:
            wanted = weight.requires_grad, bias is not None and bias.requires_grad
            _, of_weight, of_bias = parts(False, *wanted)
            found = [(weight, of_weight)] if wanted[0] else []
            return found + ([(bias, of_bias)] if bias is not None and wanted[1] else [])

        back = parts(True, False, False)[0] if ctx.needs_input_grad[0] else None
        if ctx.deferred.put_off(make):
            return back, None, None, None, None, None
        made = {id(one): value for one, value in make()}
        return back, made.get(id(weight)), made.get(id(bias)), None, None, None
