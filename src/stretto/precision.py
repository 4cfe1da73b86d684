"""What a precision means, the same on every plan.

=================  ==============  ================  =============================================
precision          trained, saved  forward uses      gradients are added, norms and updates are in
=================  ==============  ================  =============================================
``fp64``           float64         float64           float64
``fp32``           float32         float32           float32
``bf16``           float32         copies, bfloat16  float32
``fp16``           float32         copies, float16   float32; backward runs on a scaled loss
``bf16-autocast``  float32         float32, cast by  float32
                                   torch.autocast
=================  ==============  ================  =============================================

Buffers are float32 (float64 in fp64): running statistics and rotary tables would suffer from less. What the model
returns in a lower precision is widened to float32 before loss() sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# The type that forward computes with: of its inputs, and of the copies of the parameters.
COMPUTE: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "bf16-autocast": torch.float32,
    }
)
_NARROW: Final = (torch.bfloat16, torch.float16)


class _NoSinglePrecision(TorchFunctionMode):
    """Turns every request for float32 into one for float64.

    Models cast to float32 in places where half precision would hurt (norms, softmax, rotary tables). In a float64 run
    such a cast *loses* precision, and a proof to 1e-13 would prove nothing; so inside this mode it widens instead.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        keywords = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **keywords)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def computing(precision: str, device: str = "cpu") -> AbstractContextManager[Any]:
    """Surrounds forward and loss; ``device`` is the device's type."""
    if precision == "fp64":
        return _double()
    return torch.autocast(device, torch.bfloat16) if precision == "bf16-autocast" else nullcontext()


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NoSinglePrecision():
            yield
    finally:
        torch.set_default_dtype(before)


def cast_model(module: nn.Module, precision: str) -> nn.Module:
    """The module with its real and complex parameters (and in fp64 its buffers) in the width that is trained, in place.

    Buffers of a lower precision are widened too: a statistic in bfloat16 would not move.
    """
    real = torch.float64 if precision == "fp64" else torch.float32
    complex_ = torch.complex128 if precision == "fp64" else torch.complex64

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():  # Module.to would throw the imaginary part away
            return tensor.to(complex_)
        return tensor.to(real) if tensor.is_floating_point() else tensor

    module._apply(cast)  # type: ignore[no-untyped-call]
    return module


def retyped(module: nn.Module, precision: str) -> dict[str, str]:
    """The types that :func:`cast_model` would take from the parameters, other than torch's default one: each with the
    name of the first parameter that has it."""
    real = torch.float64 if precision == "fp64" else torch.float32
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (real, torch.get_default_dtype()):
            found.setdefault(str(parameter.dtype).removeprefix("torch."), name)
    return found


def widen(tree: Any) -> Any:
    """The same tree with its tensors of a lower precision in float32: sums of many losses need the digits."""
    from torch.utils._pytree import tree_map

    return tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW else leaf, tree
    )


@dataclass(frozen=True)
class LossScale:
    """fp16's dynamic loss scale (arXiv 1710.03740, section 3.2): one number, the same on every rank.

    Float16 ends at 6e-8, where many gradients lie; a loss times ``scale`` has larger ones. Where they overflow, the
    step is skipped and the scale halved; after 2000 good steps in a row it is doubled. Powers of two cost no digit.

    Args:
        scale: what the loss is multiplied with before backward.
        good: steps in a row without overflow.
    """

    scale: float = 65536.0
    good: int = 0

    def after(self, finite: bool) -> LossScale:
        """The scale of the next step."""
        if not finite:
            return LossScale(max(self.scale / 2, 2.0**-14))
        if self.good + 1 >= 2000:
            return LossScale(min(self.scale * 2, 2.0**24))
        return replace(self, good=self.good + 1)


def first_scale(precision: str) -> LossScale | None:
    """The scale to begin with, or None where the precision needs none."""
    return LossScale() if precision == "fp16" else None
