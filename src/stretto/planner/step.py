"""How long a step takes: layers on stages, messages that nothing hides, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from stretto.planner.collectives import Links
from stretto.planner.constants import Constants
from stretto.planner.cut import Stages, passing
from stretto.planner.hardware import Machines
from stretto.planner.layer import LayerModel, LayerTime
from stretto.planner.setups import SCHEDULES, Array, Flags, Setups
from stretto.planner.transformer import Transformer

OPTIMIZER_BYTES = 28.0  # read and written of a parameter: Adam's three in float32, gradient and copy in 16 bits
HOST_RATE: Final = 25e9  # bytes/s of a host's memory for each of its devices (200 GB/s for eight)
HOST_LINK_RATE: Final = 20e9  # bytes/s one way between a device and its host (PCIe 4, 16 lanes)
ZERO_BUBBLE: Final = SCHEDULES.index("zero-bubble")
_HIDDEN = 0.7  # of a step's work beside which weights of zero=3 are gathered


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; each array has an entry for each setup.

    Args:
        compute: layers and the head, on the longest stage, without messages.
        tensor: messages there, of ``tp``, and of ``cp`` that nothing hides.
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


@dataclass(frozen=True)
class Work:
    """What doesn't depend on schedule, ``zero`` and offload. Seconds of one microbatch; an entry for each setup.

    Args:
        layers: of the longest stage; ``head``: whether it has the output layer.
        longest: forward and backward of that stage; ``whole``: of all stages together.
    """

    times: LayerTime
    layers: Array
    longest: Array
    whole: Array


def step_time(
    model: Transformer,
    machines: Machines,
    constants: Constants,
    setups: Setups,
    precision: str,
    stages: Stages = "shortest",
) -> StepTime:
    """The time of a step of each setup.

    Args:
        precision: of the products of matrices.
        stages: how layers are cut into them; where a rank has several, each has as many layers.
    """
    return StepModel(model, machines, constants, precision, stages).time(setups)


class StepModel:
    """The costs of one model's steps, each part for itself: a search combines them before it adds them up."""

    def __init__(
        self, model: Transformer, machines: Machines, constants: Constants, precision: str, stages: Stages = "shortest"
    ) -> None:
        self._model, self._machines, self._constants, self._stages = model, machines, constants, stages
        self._links = Links(machines, constants)
        self._layers = LayerModel(model, machines, self._links, precision)

    def time(self, one: Setups) -> StepTime:
        """Of each setup."""
        work = self.work(one)
        tensor = one.microbatches * work.layers * work.times.messages
        bubble, stages = self.pipeline(one, work)
        compute = one.microbatches * work.longest - tensor
        return StepTime(compute, tensor, bubble, stages, self.data(one, work), self.update(one), work.layers)

    def work(self, one: Setups) -> Work:
        """Of a microbatch."""
        times = self._layers.times(one)
        layers, head = longest_stage(self._model, times, one, self._stages)
        longest = layers * times.layer + np.where(head, times.head, 0.0) + np.where(one.pp == 1, times.embedding, 0.0)
        return Work(times, layers, longest, self._model.layers * times.layer + times.head + times.embedding)

    def least_work(self, one: Setups) -> Work:
        """Of a microbatch, of the schedule whose stages suit best: those with several on a rank have even ones."""
        work, layers = self.work(one), self._model.layers
        even = layers / one.pp * work.times.layer + work.times.head
        better = (layers % one.pp == 0) & (one.pp > 1) & (even < work.longest)
        return replace(work, longest=np.where(better, even, work.longest))

    def hop(self, one: Setups) -> Array:
        """Seconds of a message from one stage to the next."""
        message = one.compute_bytes * one.tokens * self._model.hidden / np.where(one.parallel_sequence, one.tp, 1.0)
        return self._links.send(message, one.tp * one.cp * one.dp)

    def pipeline(self, one: Setups, work: Work) -> tuple[Array, Array]:
        """The bubble, and the messages between stages: 1f1b's bubble, which several stages on a rank divide (arXiv
        2104.04473, section 2.2). With zero-bubble (ZB-H1, arXiv 2401.10241, section 2.2) no stage waits for another's
        work on weights, and its own stands in the gaps; with few microbatches there isn't enough of it for them."""
        gap = np.where(one.pp > 1, work.whole - work.longest, 0.0)
        share, other = weight_share(one), gap / np.maximum(one.pp - 1, 1.0)
        few = (1 - share) * gap - share * (one.microbatches * work.longest - other)
        filled = np.maximum((1 - 2 * share) * gap, few)
        bubble = np.where(one.schedule == ZERO_BUBBLE, filled, gap / one.chunks)
        hops = 2 * (one.pp - 1 + 0.5 * (one.microbatches - 1)) * one.chunks
        return bubble, np.where(one.pp > 1, hops * self.hop(one), 0.0)

    def _held(self, one: Setups) -> Array:
        """Parameters of the first stage on a rank, before ``zero`` cuts them."""
        model = self._model
        tables = np.where((one.pp == 1) & (not model.tied), 2.0, 1.0) * model.table
        return (model.layers / one.pp * model.layer_parameters + tables) / one.tp

    def data(self, one: Setups, work: Work) -> Array:
        """Gradients are added up once a step, after the last microbatch; with ``zero=3`` they are after each, over the
        ranks that share one copy, and weights are gathered there twice for each, beside the work; what the copies (of
        hybrid sharding, arXiv 2304.11277, section 3.2.2, and of ``cp``) differ in is added up once."""
        links, held, apart = self._links, self._held(one), one.tp * one.cp
        sums = links.spread(held * one.gradient_bytes, one.dp * one.cp, one.tp)
        # Of an all-reduce the second half, where ranks that have each updated a part gather the weights instead.
        last = np.where(one.zero >= 1, 0.5 * links.spread(held * one.compute_bytes, one.shard, apart), 0.0)
        sums = sums - np.where(one.zero >= 1, 0.5 * links.spread(held * one.gradient_bytes, one.shard, apart), 0.0)
        beside = np.where(one.overlapped, _HIDDEN * 2 / 3 * work.longest, 0.0)
        once = np.maximum(0.0, sums - beside) + last
        gathers = links.spread(held * one.compute_bytes, one.shard, apart)
        each = one.microbatches * (gathers + 0.5 * links.spread(held * one.gradient_bytes, one.shard, apart))
        between = np.where(one.cp > 1, one.tp, apart * one.shard)
        copies = links.spread(held * one.gradient_bytes / one.shard, one.dp * one.cp / one.shard, between)
        shared = np.maximum(0.0, each - _HIDDEN * one.microbatches * work.whole) + 0.05 * each + copies
        return np.where(one.zero == 3, shared, once)

    def update(self, one: Setups) -> Array:
        """On the device; where what the optimizer keeps lies on the host, there, with gradients and weights on their
        way (arXiv 2101.06840, section 4)."""
        share, constants = self._held(one) / np.where(one.zero >= 1, one.shard, 1.0), self._constants
        here = share * OPTIMIZER_BYTES / (self._machines.device.memory_rate * constants.memory)
        away = share * (OPTIMIZER_BYTES / HOST_RATE + (one.gradient_bytes + one.compute_bytes) / HOST_LINK_RATE)
        return np.where(one.offload, away, here)


def weight_share(one: Setups) -> Array:
    """The part of forward and backward that makes the gradients of weights: as much as forward takes."""
    return 1 / (3.0 + one.full)


def longest_stage(model: Transformer, times: LayerTime, one: Setups, stages: Stages) -> tuple[Array, Flags]:
    """Layers of the longest stage, and whether it has the output layer."""
    layers, head = _LONGEST[stages](model, times, one)
    uncut = (one.pp == 1) | (one.chunks > 1)
    return np.where(uncut, model.layers / one.pp, layers), head | uncut


def _even(model: Transformer, times: LayerTime, one: Setups) -> tuple[Array, Flags]:
    return model.layers / one.pp, np.ones(len(one), bool)


def _passing(model: Transformer, times: LayerTime, one: Setups) -> tuple[Array, Flags]:
    front, last = passing(model, one)
    end, middle = last * times.layer + times.head, front * times.layer
    return np.where(end >= middle, last, front), end >= middle


def _shortest(model: Transformer, times: LayerTime, one: Setups) -> tuple[Array, Flags]:
    """All but the last stage have as many layers, rounded up, and the last has the rest. With so many that the last
    with its head is as long as another, (layers + head) / pp, rounded down or up: fewer in the others make the last
    longer, more make the others longer."""
    others = np.maximum(one.pp - 1, 1.0)
    most = np.ceil(model.layers / others)
    up = np.minimum(np.ceil((model.layers + times.head / times.layer) / one.pp), most)
    best, layers, head = np.full(len(one), np.inf), np.zeros(len(one)), np.zeros(len(one), bool)
    for rest in (up, np.maximum(up - 1, 1.0)):
        last = np.maximum(model.layers - rest * others, 0.0)
        end, middle = last * times.layer + times.head, rest * times.layer
        seconds = np.maximum(end, middle)
        better = seconds < best
        best = np.where(better, seconds, best)
        layers = np.where(better, np.where(end >= middle, last, rest), layers)
        head = np.where(better, end >= middle, head)
    return layers, head


_LONGEST: Final = MappingProxyType({"even": _even, "passing": _passing, "shortest": _shortest})
