"""What a task says of how its model may be cut, where that shouldn't be found from its graph alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from stretto.errors import TaskError

COLUMN, ROW, WHOLE = "column", "row", "whole"
DIMENSIONS: Final[Mapping[str, int | None]] = MappingProxyType({COLUMN: 0, ROW: 1, WHOLE: None})


@dataclass(frozen=True)
class Layout:
    """Wishes of a task; a plan that can't follow one is refused. Returned by its ``layout()``.

    Args:
        tensor: for ``tp``, by a pattern of names of modules or parameters (as in ``blocks.*.up``): the dimension of the
            weight that is cut, or ``"column"`` for 0 (of a linear layer its outputs), ``"row"`` for 1 (its inputs), or
            ``"whole"``. Parameters without that dimension, such as biases, follow the rest. What no pattern names is
            found from the graph.
        cuts: for ``pp`` without ``branch``, the modules with which the stages after the first begin, in order.
        towers: for ``branch``, of each rank the patterns of the modules that run there (beside ``pp``, of each tower's
            ranks); what is named by none runs on the last rank, before or after them (beside ``pp``, on several).
    """

    tensor: Mapping[str, int | str] = field(default_factory=dict)
    cuts: Sequence[str] = ()
    towers: Sequence[Sequence[str]] = ()

    def dimension(self, pattern: str) -> int | None:
        """Of one of ``tensor``; None: whole."""
        value = self.tensor[pattern]
        return DIMENSIONS[value] if isinstance(value, str) else value


def check_layout(value: Any) -> Layout:
    """``value`` as a layout. Raises TaskError for what is none."""
    if not isinstance(value, Layout):
        raise TaskError(f"task: layout() must return a stretto.Layout, got {type(value).__name__}")
    for pattern, wish in value.tensor.items():
        if isinstance(wish, bool) or not (wish in DIMENSIONS if isinstance(wish, str) else isinstance(wish, int)):
            raise TaskError(
                f"task: layout() wants {pattern!r} cut along {wish!r}; expected the number of a dimension, "
                f"or one of {', '.join(map(repr, DIMENSIONS))}"
            )
    for name, names in (("cuts", value.cuts), *(("towers", one) for one in value.towers)):
        if isinstance(names, str) or not all(isinstance(one, str) for one in names):
            raise TaskError(f"task: layout() has {names!r} in its {name}; expected a list of names of modules")
    return value
