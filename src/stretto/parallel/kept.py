"""Results of one forward that a second one takes over instead of computing them again.

As torch's ``create_selective_checkpoint_contexts``, but what is changed in place later is kept as it was: torch's own
LSTM and GRU add to what a matrix product gave, and models have ``ReLU(inplace=True)`` behind convolutions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stretto.graph.effects import written_arguments

KEPT: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm", "_grouped_mm"),
        *("convolution", "_convolution", "mkldnn_rnn_layer", "_cudnn_rnn"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
        "_efficient_attention_forward",
    }
)
"""Names of the operators in torch's ``aten`` whose results ``selective`` keeps."""
CHANGED: Final = "recompute=selective keeps a result that was changed in place after forward"
OTHER: Final = "recompute=selective keeps results of other operations than the second forward asks for"


class _Result:
    """What one call of an operator returned."""

    def __init__(self, returned: Any) -> None:
        self._value = tree_map_only(Tensor, _apart, returned)
        self._versions = [leaf._version for leaf in _tensors(self._value)]

    def copy(self) -> None:
        """It is about to be changed."""
        self._value = tree_map_only(Tensor, torch.clone, self._value)
        self._versions = [leaf._version for leaf in _tensors(self._value)]

    def memory(self) -> list[int]:
        """Where it lies; a tensor without a storage of its own is left to the count of its changes."""
        return [place for leaf in _tensors(self._value) if (place := _memory(leaf)) is not None]

    def take(self) -> Any:
        """The value, for good."""
        if [leaf._version for leaf in _tensors(self._value)] != self._versions:
            raise RuntimeError(CHANGED)
        return self._value


class Kept:
    """The results of one forward: ``noting`` surrounds it, ``replaying`` the second one, which uses them up."""

    def __init__(self) -> None:
        self._results = defaultdict[Any, list[_Result | None]](list)
        self.noting: TorchDispatchMode = _Noting(self._results)
        self.replaying: TorchDispatchMode = _Replaying(self._results)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: dict[Any, list[_Result | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._there: dict[int, list[_Result]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in _written(operator)(args, kwargs) if self._there else ():
            for leaf in _tensors(value):
                for result in self._there.pop(_memory(leaf) or 0, ()):
                    result.copy()
        returned = operator(*args, **kwargs)
        if keeps(operator, args, kwargs):
            result = _Result(returned)
            self._results[operator].append(result)
            for place in result.memory():
                self._there.setdefault(place, []).append(result)
        return returned

    def __exit__(self, *raised: Any) -> None:
        self._there.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: dict[Any, list[_Result | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._asked = defaultdict[Any, int](int)

    def __enter__(self) -> Any:
        self._asked.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not keeps(operator, args, kwargs):
            return operator(*args, **kwargs)
        results, at = self._results[operator], self._asked[operator]
        if at == len(results):
            raise RuntimeError(f"{OTHER} ({operator})")
        result, results[at] = results[at], None
        if result is None:
            raise RuntimeError("recompute=selective keeps results for one backward, and this is another one")
        self._asked[operator] += 1
        return result.take()


def keeps(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``selective`` keeps what an operator returned."""
    known, draws = _known(operator)
    return known and not any(
        bool(kwargs.get(name, args[at] if at < len(args) else default)) for at, name, default in draws
    )


@lru_cache
def _known(operator: Any) -> tuple[bool, tuple[tuple[int, str, Any], ...]]:
    """Whether results of the operator may be kept, and the arguments by which it draws random numbers. Where it isn't
    run again the generator would stay behind, and what comes after it would draw others."""
    schema = getattr(operator, "_schema", None)  # operators of a higher order have none
    if schema is None or schema.name.removeprefix("aten::") not in KEPT:
        return False, ()
    arguments = enumerate(schema.arguments)
    return True, tuple(
        (at, one.name, one.default_value) for at, one in arguments if one.name in ("dropout_p", "dropout")
    )


@lru_cache
def _written(operator: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """What gives the arguments of a call that the operator changes."""
    schema = getattr(operator, "_schema", None)
    writes = [] if schema is None else written_arguments(schema)

    def found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [args[at] if at < len(args) else kwargs.get(name) for at, name in writes]

    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _apart(tensor: Tensor) -> Tensor:
    """The same without what autograd will note on it; one counter counts the changes of both."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _memory(tensor: Tensor) -> int | None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if plain else None
