"""How one model lies over the ranks that share it: ``apply`` lays a template out, the same way at every degree."""

from stretto.parallel._base import Applied, Call, Example, Manner, Microbatch, Place, Roots
from stretto.parallel.apply import apply
from stretto.parallel.optimizer import BoundOptimizer
from stretto.parallel.template import Template

__all__ = [
    "Applied",
    "BoundOptimizer",
    "Call",
    "Example",
    "Manner",
    "Microbatch",
    "Place",
    "Roots",
    "Template",
    "apply",
]
