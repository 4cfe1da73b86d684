"""How training systems cut layers into stages."""

from __future__ import annotations

from typing import Literal

import numpy as np

from stretto.planner.setups import Array, Setups
from stretto.planner.transformer import Transformer

Stages = Literal["even", "passing", "shortest"]
"""``even``: each has as many layers. ``passing``: each takes layers until what it and those before it cost has passed
its share of the whole, by the matrices of layers and of the output layer (nanotron). ``shortest``: the longest stage
takes as little time as it can."""


def passed(model: Transformer, stages: Array, before: Array) -> Array:
    """Layers of the first ``before`` of so many stages, cut by ``passing``."""
    layer = 4 * model.hidden**2 + (1 + model.ups) * model.ffn * model.hidden  # grouped heads are counted as whole ones
    each = (model.layers + model.table / layer) / stages
    found = np.minimum(np.floor(each * before + 1e-9) + 1, model.layers)
    return np.where(before >= stages, float(model.layers), np.where(before > 0, found, 0.0))


def passing(model: Transformer, one: Setups) -> tuple[Array, Array]:
    """Layers of the first and of the last stage."""
    last = model.layers - passed(model, one.pp, one.pp - 1)
    return passed(model, one.pp, np.ones(len(one))), np.where(one.pp == 1, float(model.layers), last)
