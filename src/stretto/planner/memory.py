"""How much memory a step takes on the rank that needs the most.

Counted: states by what ``zero`` leaves of them (arXiv 1910.02054), what layers keep of the microbatches under way
(arXiv 2205.05198, section 4), the output layer's results, weights that are gathered, buffers of messages. Two numbers
can't be: what the allocator holds beside what is in use, and what communication does beside tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

import numpy as np

from stretto.planner.cut import passing
from stretto.planner.setups import SCHEDULES, Array, Flags, Setups
from stretto.planner.software import Software
from stretto.planner.transformer import Transformer

ALLOCATOR = 0.1  # of activations: blocks that are rounded up, or free where they don't fit what comes next
COMMUNICATION_BYTES = 3.9e9  # of a device that talks with others: buffers of its communicators, beside tensors
CONTEXT_BYTES = 6e8  # of the driver and of loaded kernels: what a device shows of a process that has computed once
GATHERED_LAYERS = 3  # of zero=3: one at work, one that comes, one whose gradients leave
_STOCK: Final = Software()
_GPIPE: Final = SCHEDULES.index("gpipe")


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs the most; each array has an entry for each setup.

    Args:
        states: parameters, gradients and what the optimizer keeps.
        activations: of the layers, of all microbatches under way, and of stages' messages.
        logits: of the output layer and the loss.
        gathers: weights of ``zero=3`` while they are whole, and their gradients.
        buckets: of messages of gradients and weights.
        allocator: held, but not in use.
        context: of the device, of communication.
        stage: which one it is.
    """

    states: Array
    activations: Array
    logits: Array
    gathers: Array
    buckets: Array
    allocator: Array
    context: Array
    stage: Array

    @property
    def allocated(self) -> Array:
        """What tensors take."""
        return self.states + self.activations + self.logits + self.gathers + self.buckets

    @property
    def reserved(self) -> Array:
        """What the allocator has taken from the device."""
        return self.allocated + self.allocator

    @property
    def total(self) -> Array:
        """What the device shows, and what has to fit."""
        return self.reserved + self.context


def peak_memory(
    model: Transformer,
    setups: Setups,
    software: Software = _STOCK,
    cut: Sequence[int] | None = None,
    layer_bytes: float | None = None,
    first: bool = False,
    behind: Flags | None = None,
) -> Memory:
    """The peak of each setup.

    Args:
        cut: layers on each stage of all setups; None: as the training system cuts.
        layer_bytes: that a layer keeps of a token, where that was measured.
        first: on the first stage, though another may need more.
        behind: the host launches a layer sooner than the device is through with it; None: all do.
    """
    rank = _Rank(model, setups, software, layer_bytes, np.ones(len(setups), bool) if behind is None else behind)
    if cut is None:
        front, end = _CUTS[software.stages](model, setups)
        found = rank.memory(np.zeros(len(setups)), front)
        return found if first else _larger(found, rank.memory(setups.pp - 1, end))
    every = [rank.memory(np.full(len(setups), float(at)), np.full(len(setups), float(n))) for at, n in enumerate(cut)]
    found = every[0]
    for other in every[1:] if not first else ():
        found = _larger(found, other)
    return found


def _larger(one: Memory, other: Memory) -> Memory:
    more = other.total > one.total
    return Memory(*(np.where(more, getattr(other, part.name), getattr(one, part.name)) for part in fields(Memory)))


def _even(model: Transformer, one: Setups) -> tuple[Array, Array]:
    even = np.ceil(model.layers / one.pp)
    return even, even


def _shortest(model: Transformer, one: Setups) -> tuple[Array, Array]:
    """A layer goes to the stage in which it begins, by the cost of all that comes before it, the output layer counted
    as the layers that it costs."""
    each = (model.layers + np.where(one.pp > 1, model.table / model.layer_matrices, 0.0)) / one.pp
    front = np.minimum(np.ceil(each - 1e-9), model.layers)
    before = np.where(one.pp > 1, np.ceil(each * (one.pp - 1) - 1e-9), 0.0)
    return front, np.maximum(model.layers - before, 0.0)


# Layers of the first and of the last stage.
_CUTS: Final = MappingProxyType({"even": _even, "passing": passing, "shortest": _shortest})


class _Rank:
    """One rank of a stage, for each setup."""

    def __init__(
        self, model: Transformer, setups: Setups, software: Software, layer_bytes: float | None, behind: Flags
    ) -> None:
        self._behind = behind | (setups.pp == 1)
        self._model, self._one, self._software, self._measured = model, setups, software, layer_bytes
        self._tokens = setups.micro * setups.sequence / setups.cp
        self._parts: Array = np.where(setups.parallel_sequence, setups.tp, 1.0)  # of what lies beside cut layers

    def memory(self, stage: Array, layers: Array) -> Memory:
        """Of a stage of so many layers."""
        one, model = self._one, self._model
        last = stage == one.pp - 1
        tables = np.where(stage == 0, 1.0, 0.0) + np.where(last & ((one.pp > 1) | (not model.tied)), 1.0, 0.0)
        held = (layers * model.layer_parameters + tables * model.table) / one.tp
        held = held + np.where(stage == 0, float(model.positions * model.hidden), 0.0)
        activations = self._activations(stage, layers)
        results = self._tokens * model.vocab / one.tp
        logits = np.where(last, results * (one.compute_bytes + 4 * self._software.activations.logit_copies), 0.0)
        gathers, buckets = self._gathers(tables), self._buckets(held)
        allocator = ALLOCATOR * (activations + logits + gathers)
        context = CONTEXT_BYTES + np.where(one.dp * one.tp * one.pp * one.cp > 1, COMMUNICATION_BYTES, 0.0)
        return Memory(self._states(held), activations, logits, gathers, buckets, allocator, context, stage)

    def _states(self, held: Array) -> Array:
        one, facts = self._one, self._software.states
        wide = one.compute_bytes == 4  # the model's weights are what the optimizer works on
        optimizer = np.where(wide, 8.0, float(facts.optimizer_bytes)) * ~one.offload
        gradients = np.where(wide, 4.0, float(facts.gradient_bytes))
        weights = np.where((one.zero == 3) & (not facts.weights_apart) & ~wide, 0.0, one.compute_bytes)
        parts = [np.where(one.zero >= least, one.shard, 1.0) for least in (3, 2, 1)]
        return held * (weights / parts[0] + gradients / parts[1] + optimizer / parts[2])

    def _activations(self, stage: Array, layers: Array) -> Array:
        one, tokens = self._one, self._tokens
        layer, rest = tokens * self._layer(), tokens * self._beside_square()
        kept = np.where(one.full, tokens * self._between(), np.where(one.selective, tokens * self._selected(), layer))
        messages = np.where(one.pp > 1, 2 * tokens * self._between(), 0.0)  # a stage's input and its output
        # Of one layer that is computed again all is there, and its gradients; those of the square overwrite it.
        again = np.where(one.full | one.selective, layer + rest, 0.0)
        return self._under_way(stage) * (layers * kept + messages) + again

    def _under_way(self, stage: Array) -> Array:
        """Microbatches whose activations a stage holds; parts of one where it has several chunks of layers."""
        one = self._one
        ahead = np.minimum(one.microbatches, one.pp - stage)
        begun = 2 * (one.pp - stage - 1) + (one.chunks - 1) * one.pp + 1
        ahead = np.where(one.chunks > 1, np.minimum(one.microbatches, begun / one.chunks), ahead)
        return np.where(one.schedule == _GPIPE, one.microbatches, ahead)

    def _between(self) -> Array:
        """Bytes of a token between layers."""
        return self._one.compute_bytes * self._model.hidden / self._parts

    def _layer(self) -> Array:
        """Bytes that a layer keeps of a token, nothing being computed again."""
        if self._measured is not None:
            return np.full(len(self._one), self._measured)
        return self._beside_square() + self._square() / self._one.tp

    def _beside_square(self) -> Array:
        return 2 * self._between() + self._inputs() + self._masks() + self._inside() / self._one.tp

    def _inputs(self) -> Array:
        """Of the two norms' results, which cut layers read."""
        one, gathered = self._one, self._software.activations.gathered
        whole: Flags = ~one.parallel_sequence
        if gathered != "never":
            whole = whole | self._behind | (gathered == "always")
        return 2 * one.compute_bytes * self._model.hidden / np.where(whole, 1.0, one.tp)

    def _masks(self) -> Array:
        return 2 * self._model.hidden / self._parts * self._software.activations.dropout

    def _inside(self) -> Array:
        """Of what ``tp`` cuts: queries, keys, values, attention's result; what the feed-forward layer computes."""
        one, model, facts = self._one, self._model, self._software.activations
        turned = model.hidden + model.kv_hidden if facts.projections else 0.0
        up = (4 - facts.compiled) if model.gated else 2
        return one.compute_bytes * (2 * model.hidden + 2 * model.kv_hidden + turned + up * model.ffn)

    def _square(self) -> Array:
        """Attention's softmax, and its dropout."""
        one, dropout = self._one, self._software.activations.dropout
        each = one.compute_bytes * (1 + dropout) + dropout
        return np.where(one.flash, 0.0, one.sequence * self._model.heads * each)

    def _selected(self) -> Array:
        """Bytes that a layer keeps of a token with what ``selective`` means."""
        model, one = self._model, self._one
        if self._software.activations.selective == "attention":
            return self._beside_square()
        products = 3 * model.hidden + 2 * model.kv_hidden + model.ups * model.ffn
        return self._between() + one.compute_bytes * (model.hidden + products / 2) / one.tp

    def _gathers(self, tables: Array) -> Array:
        one, model = self._one, self._model
        each = one.compute_bytes * (GATHERED_LAYERS * model.layer_parameters + tables * model.table)
        each = each + one.gradient_bytes * np.maximum(model.layer_parameters, np.minimum(tables, 1.0) * model.table)
        return np.where((one.zero == 3) & (one.shard > 1), each / one.tp, 0.0)

    def _buckets(self, held: Array) -> Array:
        one, facts = self._one, self._software.states
        fixed = 2 * one.compute_bytes * np.minimum(held, facts.bucket_elements)
        return np.where(one.dp > 1, facts.copy_bytes * held, 0.0) + np.where(one.zero >= 1, fixed, 0.0)
