"""Random numbers held still: every operator that draws gives one constant, whatever piece of a batch it is given.

A piece draws its own random numbers, so outputs of a whole and of its halves differ by dropout alone. With the draws
held still, whatever still differs is no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Mapping[str, Any]

# By operator: from its arguments by name, a value that it may well draw. Nothing is dropped; noise is half a deviation.
_CONSTANTS: Final[Mapping[str, Callable[[Arguments], Any]]] = MappingProxyType(
    {
        "bernoulli": lambda a: 1.0,
        "rand": lambda a: 0.5,
        "randn": lambda a: 0.5,
        "uniform": lambda a: (a["from"] + a["to"]) / 2,
        "normal": lambda a: a["mean"] + 0.5 * a["std"],
        "exponential": lambda a: 1.0,
        "randint": lambda a: a.get("low", 0),
        "random": lambda a: a.get("from", 0),
        "multinomial": lambda a: 0,
    }
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the coarsest type that floats are computed in, and with ``still`` holds random numbers still."""

    def __init__(self, still: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._still = still
        self.begin()

    def begin(self) -> None:
        """Types are noted from here on: data come in float32 and are widened."""
        self.coarsest = torch.finfo(torch.float64).eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_").removesuffix("_like")
        if not self._still or name not in (*_CONSTANTS, "randperm"):
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result: Tensor = func(*args, **kwargs)
        torch.set_rng_state(before)
        if name == "randperm":  # in its first order, a batch that is mixed with itself would look like one that isn't
            return result.copy_(torch.arange(len(result) - 1, -1, -1))
        return result.copy_(torch.as_tensor(_CONSTANTS[name](_by_name(func, args, kwargs))).expand_as(result))


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    declared = func._schema.arguments
    given = dict(zip((each.name for each in declared), args, strict=False))
    return {**{each.name: each.default_value for each in declared if each.has_default_value()}, **given, **kwargs}
