"""What a task, or a model of Hugging Face's, says of how parameters are cut inside: a wish for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from torch import nn

from stretto.errors import Refused, nearest
from stretto.layout import Layout

_OWN_PLAN: Final = "the model's own plan"
# Ways of Hugging Face's tensor-parallel plans, as the dimension of a weight [out, in] or of a table [rows, features].
_WAYS: Final[Mapping[str, int | None]] = MappingProxyType(
    {
        **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise"), 0),
        **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"), 1),
    }
)


@dataclass(frozen=True)
class Wish:
    """For one parameter.

    Args:
        dim: the dimension that is to be cut; None: none.
        by: who wants it.
        firm: it is followed, or the plan refused; otherwise what can't be is said and left.
    """

    dim: int | None
    by: str
    firm: bool


def wishes_of(layout: Layout, module: nn.Module) -> Mapping[str, Wish]:
    """By the name of a parameter, a tied one's first. A task's wishes come before the model's own plan.

    Raises:
        Refused: a pattern that fits nothing.
    """
    owners: dict[str, list[str]] = {}  # of each parameter all names that it has, tied ones in one
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(first.setdefault(id(parameter), name), []).append(name)
    dims = {name: parameter.dim() for name, parameter in module.named_parameters()}
    found: dict[str, Wish] = {}
    plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    for pattern, way in (plan if isinstance(plan, Mapping) else {}).items():
        if way in _WAYS:
            found |= _matched(str(pattern), Wish(_WAYS[way], _OWN_PLAN, firm=False), owners, dims)
    for pattern in layout.tensor:
        fits = _matched(pattern, Wish(layout.dimension(pattern), "layout()", firm=True), owners, dims)
        if not fits:
            names = [*owners, *(name for name, _ in module.named_modules())]
            raise Refused(
                f"plan: layout() names {pattern!r}, and no parameter with such a dimension is called so, nor a module "
                f"that has one{nearest(pattern, names)}"
            )
        found |= fits
    return found


def _matched(
    pattern: str, wish: Wish, owners: Mapping[str, list[str]], dims: Mapping[str, int]
) -> dict[str, Wish]:
    def fits(name: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)

    able = (name for name, every in owners.items() if any(map(fits, every)))
    return {name: wish for name in able if wish.dim is None or -dims[name] <= wish.dim < dims[name]}
