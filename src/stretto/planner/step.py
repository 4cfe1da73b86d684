"""How long a step takes: layers on stages, messages that nothing hides, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.planner.collectives import Links
from stretto.planner.constants import Constants
from stretto.planner.hardware import Machines
from stretto.planner.layer import LayerModel, LayerTime
from stretto.planner.setups import Array, Setups
from stretto.planner.transformer import Transformer

OPTIMIZER_BYTES = 28.0  # read and written of a parameter: Adam's three in float32, gradient and copy in 16 bits
_HIDDEN = 0.7  # of a step's work beside which weights of zero=3 are gathered


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; each array has an entry for each setup.

    Args:
        compute: layers and the head, on the longest stage, without messages.
        tensor: ``tp``'s messages there.
        bubble: what the longest stage waits for the others.
        stages: messages between stages that nothing hides.
        data: gradients, and weights of ``zero``, that nothing hides.
        update: the optimizer.
        layers: of the longest stage.
    """

    compute: Array
    tensor: Array
    bubble: Array
    stages: Array
    data: Array
    update: Array
    layers: Array

    @property
    def total(self) -> Array:
        """All of it."""
        return self.compute + self.tensor + self.bubble + self.stages + self.data + self.update


def step_time(
    model: Transformer, machines: Machines, constants: Constants, setups: Setups, precision: str, balanced: bool = True
) -> StepTime:
    """The time of a step of each setup.

    Args:
        precision: of the products of matrices.
        balanced: stages are cut so that the longest is shortest, with the output layer counted; otherwise each has as
            many layers.
    """
    links = Links(machines, constants)
    times = LayerModel(model, machines, links, precision).times(setups)
    layers, head = _longest(model, times, setups, balanced)
    one, count = setups, setups.microbatches
    longest = layers * times.layer + np.where(head, times.head, 0.0) + np.where(one.pp == 1, times.embedding, 0.0)
    whole = model.layers * times.layer + times.head + times.embedding
    tensor = count * layers * times.messages
    bubble = np.where(one.pp > 1, (whole - longest) / one.chunks, 0.0)
    message = one.compute_bytes * one.tokens * model.hidden / np.where(one.parallel_sequence, one.tp, 1.0)
    hop = links.send(message, one.tp * one.dp)
    stages = np.where(one.pp > 1, 2 * hop * (one.pp - 1 + 0.5 * (count - 1)) * one.chunks, 0.0)
    held = _held(model, setups)
    update = held / np.where(one.zero >= 1, one.dp, 1.0) * OPTIMIZER_BYTES
    update = update / (machines.device.memory_rate * constants.memory)
    data = _data(links, setups, held, count * whole)
    return StepTime(count * longest - tensor, tensor, bubble, stages, data, update, layers)


def _held(model: Transformer, one: Setups) -> Array:
    """Parameters of the first stage on a rank, before ``zero`` cuts them."""
    tables = np.where((one.pp == 1) & (not model.tied), 2.0, 1.0) * model.table
    return (model.layers / one.pp * model.layer_parameters + tables) / one.tp


def _data(links: Links, one: Setups, held: Array, work: Array) -> Array:
    """Gradients are added up once a step, after the last microbatch; with ``zero=3`` they are after each, and weights
    are gathered twice for each, beside the work."""
    once = links.spread(held * one.gradient_bytes, one.dp, one.tp)
    gathers = links.spread(held * one.compute_bytes, one.dp, one.tp)
    each = one.microbatches * (gathers + 0.5 * once)
    return np.where(one.zero == 3, np.maximum(0.0, each - _HIDDEN * work) + 0.05 * each, once)


def _longest(model: Transformer, times: LayerTime, one: Setups, balanced: bool) -> tuple[Array, Array]:
    """Layers of the longest stage, and whether it has the output layer."""
    even = model.layers / one.pp
    if not balanced:
        return even, np.ones(len(one), bool)
    best = np.where(one.pp == 1, model.layers * times.layer + times.head, np.inf)
    layers, head = np.full(len(one), float(model.layers)), np.ones(len(one), bool)
    others = np.maximum(one.pp - 1, 1.0)
    for last in range(model.layers + 1):
        rest = np.ceil((model.layers - last) / others)
        end, middle = last * times.layer + times.head, rest * times.layer
        seconds = np.maximum(end, middle)
        better = (one.pp > 1) & (seconds < best)
        best = np.where(better, seconds, best)
        layers = np.where(better, np.where(end >= middle, last, rest), layers)
        head = np.where(better, end >= middle, head)
    return layers, head
