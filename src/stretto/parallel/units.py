"""Where a model repeats itself: the layers that are handled one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from torch import nn


def units(module: nn.Module, whole: Set[nn.Parameter]) -> list[nn.Module]:
    """The submodules to gather one at a time: the elements of the module's lists, which are its repeated layers.

    An element is left to the root where it isn't called as a module, shares a parameter with something outside it (a
    tied weight must be gathered with both users), or has no parameters but those that stay ``whole``.
    """
    uses = _uses(module)
    found: list[nn.Module] = []
    for holder in module.modules():
        if isinstance(holder, nn.ModuleList):
            found += [child for child in holder if _is_unit(child, uses, whole)]
    inside = {id(below) for unit in found for below in unit.modules() if below is not unit}
    return [unit for unit in dict.fromkeys(found) if id(unit) not in inside]


def _uses(module: nn.Module) -> Counter[int]:
    """In how many places each parameter stands in the module, by its identity; a shared module makes several too."""
    owners = (owner for _, owner in module.named_modules(remove_duplicate=False))
    return Counter(id(p) for owner in owners for p in owner._parameters.values() if p is not None)


def _is_unit(module: nn.Module, uses: Mapping[int, int], whole: Set[nn.Parameter]) -> bool:
    if type(module).forward is nn.Module.forward:  # a container: its children are called, it never is
        return False
    if any(count != uses[key] for key, count in _uses(module).items()):
        return False
    return any(parameter not in whole for parameter in module.parameters())
