"""Choosing the sync rule of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from stretto.sync._base import Layout, Sync
from stretto.sync.exact import ExactSum

_RULES: Final[Mapping[str, Callable[[Layout, bool], Sync]]] = MappingProxyType({"exact": ExactSum})


def build_sync(rule: str, layout: Layout, keep: bool = True) -> Sync:
    """The rule ``rule`` over a layout. Every rank must call it. Raises ValueError for an unknown rule.

    Args:
        keep: whole gradients are kept through the step and sent once; otherwise after each microbatch.
    """
    if rule not in _RULES:
        raise ValueError(f"unknown sync rule {rule!r}; known: {', '.join(_RULES)}")
    return _RULES[rule](layout, keep)
