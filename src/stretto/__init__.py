"""stretto: train any PyTorch model on any number of devices, with the numbers of one device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stretto import losses as losses
    from stretto.cluster import Cluster as Cluster
    from stretto.errors import UserError as UserError
    from stretto.layout import Layout as Layout
    from stretto.plan import Plan as Plan
    from stretto.recipe import Recipe as Recipe
    from stretto.run import Run as Run
    from stretto.task import Params as Params
    from stretto.task import Task as Task
    from stretto.task import load_task as load_task
    from stretto.training import start as start
    from stretto.weights import load_weights as load_weights

# Name -> where it is. Loaded when first asked for, so that `import stretto` costs nothing and the command line starts
# without torch. A name without a colon is a module.
_EXPORTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cluster": "stretto.cluster:Cluster",
        "Layout": "stretto.layout:Layout",
        "Params": "stretto.task:Params",
        "Plan": "stretto.plan:Plan",
        "Recipe": "stretto.recipe:Recipe",
        "Run": "stretto.run:Run",
        "Task": "stretto.task:Task",
        "UserError": "stretto.errors:UserError",
        "load_task": "stretto.task:load_task",
        "load_weights": "stretto.weights:load_weights",
        "losses": "stretto.losses",
        "start": "stretto.training:start",
    }
)


def __getattr__(name: str) -> Any:
    """The exported names and ``__version__``, loaded when asked for (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("stretto")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, "__version__"})
