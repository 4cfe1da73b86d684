"""A piece of a model that is computed again in backward.

The second forward of a piece has to give what the first one gave. So it runs with the generators, the plain attributes
and the precision that the first one met, hears from other ranks what the first one heard, and whatever is there at the
time is put back afterwards. What can't be made the same is refused by name: each piece runs twice when it is first
called, and both answers are compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from stretto.data import Generators
from stretto.errors import Refused, one_line
from stretto.parallel.kept import Kept

_INNER: Final = frozenset(vars(nn.Module()))
_WHY: Final = (
    "does it draw from a generator of its own, or keep a cache that grows (Hugging Face's use_cache=True)? Draw from "
    "torch's, NumPy's or Python's global generator, keep nothing, or use recompute=none"
)


class Told(Protocol):
    """What forward hears from other ranks and the second forward is told again, so that it sends nothing."""

    def noting(self, into: list[Any], /) -> AbstractContextManager[None]:
        """Notes all of it that is heard inside."""

    def replaying(self, noted: list[Any], /) -> AbstractContextManager[None]:
        """Forward inside is told that, and sends nothing."""


class Several:
    """What forward hears by several ways."""

    def __init__(self, told: Sequence[Told]) -> None:
        self._told = told

    @contextmanager
    def noting(self, into: list[Any]) -> Iterator[None]:
        """See :class:`Told`; of each way a list."""
        into += [[] for _ in self._told]
        with ExitStack() as stack:
            for told, own in zip(self._told, into, strict=True):
                stack.enter_context(told.noting(own))
            yield

    @contextmanager
    def replaying(self, noted: list[Any]) -> Iterator[None]:
        """See :class:`Told`."""
        with ExitStack() as stack:
            for told, own in zip(self._told, noted, strict=True):
                stack.enter_context(told.replaying(own))
            yield


class Piece:
    """A part of the model that is computed again, to be called in its place.

    Args:
        name: for people.
        run: its own forward.
        surround: what surrounds forward, and so the second one too.
        told: what it hears from other ranks, which is asked for once.
        moved: what it is called with lies elsewhere until backward, so nothing here may hold it.
    """

    def __init__(
        self,
        name: str,
        owners: list[nn.Module],
        run: Callable[..., Any],
        *,
        how: str,
        surround: Callable[[], AbstractContextManager[Any]],
        told: Told,
        moved: bool = False,
    ) -> None:
        self.moved = moved
        self.what = f"plan: recompute={how}: {name}"
        self.run, self.how, self.surround, self.told = run, how, surround, told
        self.modules = list(dict.fromkeys(module for owner in owners for module in owner.modules()))
        self._proved = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*arguments, **keywords)
        buffers = self._buffers()
        before = _versions(buffers)
        again = _Again(self, [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)])
        # Keywords are bound here: some of checkpoint's own have names that a layer may use as well.
        output = checkpoint(
            functools.partial(self.run, **keywords),
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=functools.partial(self._contexts, again),
        )
        again.check_inputs()
        if _versions(buffers) != before:
            raise Refused(
                f"{self.what} changes a buffer in place in forward, and would do so a second time in backward; assign "
                "a new tensor to it instead, or use recompute=none"
            )
        if not self._proved:
            self._prove(again, output, arguments, keywords)
        if self.moved:
            again.let_go()
        return output

    def _contexts(self, again: _Again) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What surrounds the first forward and what surrounds the second."""
        if self.how == "full":
            return again.noting(), again
        kept = Kept()
        again.kept = kept.replaying
        return _both(again.noting(), kept.noting), again

    def _prove(self, again: _Again, output: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raises Refused where a second forward answers otherwise; what it keeps is let go at once."""
        kept, again.kept = again.kept, None
        try:
            with again:
                second = self.run(*arguments, **keywords)
        except Exception as error:
            raise Refused(f"{self.what} fails when it is computed a second time ({one_line(error)}): {_WHY}") from error
        again.kept = kept
        again.check_inputs()
        if not _alike(output, second):
            raise Refused(f"{self.what} answers otherwise when it is computed a second time: {_WHY}")
        self._proved = True

    def _buffers(self) -> list[Tensor]:
        """Those that forward has to leave alone; a BatchNorm moves its own in the first forward only."""
        own = (module for module in self.modules if not isinstance(module, _BatchNorm))
        return [buffer for module in own for buffer in module._buffers.values() if buffer is not None]

    def attributes(self) -> list[_Attributes]:
        """What the modules hold now."""
        return [_Attributes.of(module) for module in self.modules]

    def put(self, attributes: list[_Attributes]) -> None:
        """Makes the modules hold that again."""
        for module, held in zip(self.modules, attributes, strict=True):
            held.put(module)


@dataclass(frozen=True)
class _Attributes:
    """What a module holds beside torch's own attributes: names, buffers, and the contents of lists, dicts and sets."""

    plain: dict[str, Any]
    buffers: dict[str, Tensor | None]
    contents: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        plain = {key: value for key, value in vars(module).items() if key not in _INNER}
        contents = [(value, value.copy()) for value in plain.values() if type(value) in (list, dict, set)]
        return cls(plain, dict(module._buffers), contents)

    def put(self, module: nn.Module) -> None:
        """Makes the module hold that again."""
        own = vars(module)
        for key in [key for key in own if key not in _INNER and key not in self.plain]:
            del own[key]
        own.update(self.plain)
        module._buffers.clear()
        module._buffers.update(self.buffers)
        for container, content in self.contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


@dataclass
class _Again(AbstractContextManager[None]):
    """Surrounds a second forward: everything is as the first one met it, and afterwards as it was before.

    Args:
        inputs: tensors that the piece was called with.
        kept: stands in for the operators whose results were kept.
    """

    piece: Piece
    inputs: list[Tensor]
    kept: AbstractContextManager[Any] | None = None
    _generators: Generators = field(default_factory=Generators.remember)
    _told: list[Any] = field(default_factory=list)
    _stacks: list[ExitStack] = field(default_factory=list)
    _attributes: list[_Attributes] = field(init=False)
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._attributes = self.piece.attributes()
        self._versions = _versions(self.inputs)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Surrounds the first forward."""
        with self.piece.told.noting(self._told):
            yield

    def check_inputs(self) -> None:
        """Raises Refused where a tensor that the piece was called with has changed since."""
        if _versions(self.inputs) != self._versions:
            raise Refused(
                f"{self.piece.what} was called with a tensor that is changed in place before backward, which would "
                "begin with the changed one; change a copy, or use recompute=none"
            )

    def let_go(self) -> None:
        """Forgets the tensors that the piece was called with: whoever moved them looks for changes."""
        self.inputs, self._versions = [], []

    def __enter__(self) -> None:
        self.check_inputs()
        with ExitStack() as stack:
            stack.callback(self.piece.put, self.piece.attributes())
            stack.callback(Generators.remember().restore)
            self.piece.put(self._attributes)
            self._generators.restore()
            stack.enter_context(self.piece.told.replaying(self._told))
            stack.enter_context(self.piece.surround())
            if self.kept is not None:
                stack.enter_context(self.kept)
            self._stacks.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks.pop().__exit__(kind, error, trace)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each was changed in place."""
    return [tensor._version for tensor in tensors]


def _alike(one: Any, other: Any) -> bool:
    """Whether two answers are equal but for rounding: kernels of an accelerator may add in another order."""
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()) or one.layout != torch.strided:
        return bool(torch.equal(one, other)) if one.layout == torch.strided else True
    if not one.numel():
        return True
    one, other = one.detach(), other.detach()
    epsilon = torch.finfo(one.dtype).eps
    near = min(64 * epsilon, math.sqrt(epsilon)) if one.device.type == "cpu" else math.sqrt(epsilon)
    bound = near * one.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return bool(torch.isclose(one, other, rtol=0.0, atol=float(bound), equal_nan=True).all())
