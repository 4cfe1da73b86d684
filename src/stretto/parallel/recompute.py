"""Activations are dropped in forward and computed again in backward (Chen et al., arXiv 1604.06174).

``full`` computes each piece of the model again whole; ``selective`` keeps the results of matrix products, convolutions
and attention, which cost most of the time and little of the memory (Korthikanti et al., arXiv 2205.05198, section 5).

A piece is a layer of the model's lists (:func:`units`). Where there is none, it is a block of a Sequential, and of a
Sequential without blocks about the square root of its length at a time: single layers would be worth nothing, as what
one returns the next one keeps. Where ``tp`` or ``pp`` run a traced graph, pieces are stretches of that
(:mod:`stretto.parallel.stretches`). What becomes of a piece is told in :mod:`stretto.parallel.again`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from torch import nn

from stretto.parallel._base import Manner
from stretto.parallel.again import Piece
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.units import units

LEAST_SEQUENCE: Final = 4
"""A Sequential of fewer layers is not cut into pieces."""


class Recomputed:
    """What is computed again in a module (a layout's copy), until :meth:`remove`.

    Args:
        norm: the module's BatchNorms, which have their own forward already.

    ``notes``: what there is to say about it.
    """

    def __init__(self, module: nn.Module, manner: Manner, norm: GlobalBatchNorm) -> None:
        self.notes: tuple[str, ...] = ()
        self._changed: list[tuple[nn.Module, Any]] = []
        how = manner.recompute
        if how == "none":
            return
        moved = manner.offload in ("activations", "all")
        wrap = functools.partial(Piece, how=how, surround=manner.surround, told=norm, moved=moved)
        layers, sequences = _layers(module)
        for name, layer in layers.items():
            self._replace(layer, wrap(name, [layer], layer.forward))
        for name, sequence in sequences.items():
            parts = _cut(list(sequence))
            self._replace(sequence, _in_turn([wrap(_of(name, at), part, _in_turn(part)) for at, part in parts]))
            where = f"the Sequential {name}" if name else "the Sequential"
            self.notes += (f"recompute={how}: {where} is computed again in {len(parts)} pieces",)
        if not self._changed:
            self.notes = (
                f"recompute={how} is inactive: the model has no list of layers (nn.ModuleList) and no nn.Sequential of "
                f"blocks or of {LEAST_SEQUENCE} layers; its activations are kept",
            )

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._changed.append((module, vars(module).get("forward")))

        @functools.wraps(module.forward)  # what the model is called with is read off its signature
        def replaced(*arguments: Any, **keywords: Any) -> Any:
            return forward(*arguments, **keywords)

        module.forward = replaced

    def remove(self) -> None:
        """Gives the modules the forward back that they had."""
        for module, forward in self._changed:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        self._changed = []


# ------------------------------------------------------------------------------------------------- what is recomputed


def _layers(module: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Sequential]]:
    """The layers to compute again, and the Sequentials to cut into pieces, by name."""
    names = {child: name for name, child in module.named_modules()}
    layers = {names[unit]: unit for unit in units(module, frozenset())}
    sequences: dict[str, nn.Sequential] = {}
    waiting = [] if layers else [module]
    while waiting:
        found = waiting.pop(0)
        blocks = _blocks(found)
        if not isinstance(found, nn.Sequential) or not _is_cut(found):
            waiting += found.children()
        elif blocks:
            waiting += [block for block in blocks if _is_cut(block)]  # as fine as there are blocks
            layers.update({names[block]: block for block in blocks if not _is_cut(block)})
        else:
            sequences[names[found]] = found
    return layers, sequences


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Its parts that have parts of their own, and parameters."""
    return [child for child in module.children() if any(child.children()) and any(True for _ in child.parameters())]


def _is_cut(module: nn.Module) -> bool:
    """Whether it is a Sequential of several blocks, or of many single layers."""
    if type(module).forward is not nn.Sequential.forward:
        return False
    count = len(_blocks(module))
    return count > 1 or (not count and len(list(module.children())) >= LEAST_SEQUENCE)


def _cut(elements: list[nn.Module]) -> list[tuple[str, list[nn.Module]]]:
    """About as many pieces as each has elements; with the number of the first and of the last."""
    count = math.isqrt(len(elements))
    ends = [len(elements) * piece // count for piece in range(count + 1)]
    return [(f"{a}..{b - 1}", elements[a:b]) for a, b in pairwise(ends)]


def _of(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _in_turn(calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Each called with what the one before it returned, as a Sequential does."""

    def forward(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    return forward
