"""The traced graph of a model: which of its dimensions are one and the same, and what that allows."""

from stretto.graph.axes import Axes, Axis, Dims
from stretto.graph.trace import Traced, trace

__all__ = ["Axes", "Axis", "Dims", "Traced", "trace"]
