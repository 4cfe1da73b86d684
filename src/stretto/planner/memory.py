"""How much memory a step takes on the rank that needs the most.

States by what ``zero`` leaves of them (arXiv 1910.02054), activations of the microbatches that are under way on the
first stage (arXiv 2205.05198), the output layer's on the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.planner.setups import Array, Setups
from stretto.planner.transformer import Transformer

OVERHEAD_BYTES = 1.5e9  # of the device's context, of communication and of what the allocator can't use


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs the most; each array has an entry for each setup.

    Args:
        states: parameters, gradients and what the optimizer keeps.
        activations: of the layers, of all microbatches under way.
        logits: of the output layer and the loss.
        overhead: of the device's context, of communication, of the allocator.
    """

    states: Array
    activations: Array
    logits: Array
    overhead: Array

    @property
    def total(self) -> Array:
        """All of it."""
        return self.states + self.activations + self.logits + self.overhead


def peak_memory(model: Transformer, setups: Setups) -> Memory:
    """The peak of each setup."""
    one = setups
    tables = np.where((one.pp == 1) & (not model.tied), 2.0, 1.0) * model.table
    held = (np.ceil(model.layers / one.pp) * model.layer_parameters + tables) / one.tp
    share = np.where(one.zero >= 1, one.dp, 1.0)
    weights = one.compute_bytes / np.where(one.zero == 3, one.dp, 1.0)
    gradients = one.gradient_bytes / np.where(one.zero >= 2, one.dp, 1.0)
    states = held * (weights + gradients + 12 / share)
    whole = np.where(one.parallel_sequence, one.tp, 1.0)
    layer = one.tokens * (10 * model.hidden / whole + (8 * model.hidden + 4 * model.ffn * model.ups) / one.tp)
    square = np.where(one.flash | one.selective, 0.0, 5.0) * one.tokens * one.sequence * model.heads / one.tp
    kept = np.where(one.full, 2 * one.tokens * model.hidden / whole, layer + square)
    way = np.minimum(one.microbatches, one.pp) * (1 + np.where(one.chunks > 1, (one.pp - 1) / one.pp / one.chunks, 0.0))
    activations = np.ceil(model.layers / one.pp) * kept * way + np.where(one.full, layer + square, 0.0)
    logits = np.where(one.pp == 1, 14.0, 0.0) * one.tokens * model.vocab / one.tp
    return Memory(states, activations, logits, np.full(len(one), OVERHEAD_BYTES))
