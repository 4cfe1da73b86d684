"""What a precision means, the same on every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

COMPUTE: Final[Mapping[str, torch.dtype]] = MappingProxyType({"fp32": torch.float32, "fp64": torch.float64})


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


def computing(precision: str) -> AbstractContextManager[Any]:
    """Surrounds forward and loss."""
    return _double() if precision == "fp64" else nullcontext()


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
    """The module with its floating and complex parameters and buffers in the width of ``precision``, in place."""
    real = COMPUTE[precision]
    complex_ = torch.complex128 if real == torch.float64 else torch.complex64

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():  # Module.to would throw the imaginary part away
            return tensor.to(complex_)
        return tensor.to(real) if tensor.is_floating_point() else tensor

    module._apply(cast)  # type: ignore[no-untyped-call]
    return module
