"""How long a layer takes on a device: its operations counted, each by what binds it.

A product of matrices takes its flops at the device's rate or its bytes at the memory's, whichever is longer; other
operations take their bytes. All of a layer takes at least what the host needs to launch it, which binds where layers
are cut small. Flops and bytes follow arXiv 2205.05198, section 4, and 2104.04473, appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from stretto.planner.collectives import Links
from stretto.planner.hardware import Machines
from stretto.planner.setups import Array, Flags, Setups
from stretto.planner.transformer import Transformer

KERNEL_SECONDS = 3e-5  # of any operation on a device beside its work: its start, its end, the gap to the next
FORWARD_KERNELS, BACKWARD_KERNELS = 10, 16  # element by element
# Of the rate, by the bytes of which a row of a matrix is a multiple (arXiv 2401.14489, section 4); below all, the last.
ALIGNED = ((128, 1.0), (64, 0.95), (32, 0.85), (16, 0.65))
UNALIGNED = 0.3
# Megatron's softmax is one kernel where the heads of a microbatch are a multiple of this; else its parts are launched.
SOFTMAX_HEADS, SOFTMAX_PARTS = 4, 1.3
EIGHTH_MESSAGES = 0.75  # of the bytes: half of what is gathered, all of what is summed
SHOWN = 0.6  # of messages that go in pieces beside products: the first and the last piece, and what they slow down
SLOWER = 0.08  # of a host's launches, for each doubling of the ranks that wait for the slowest
_CONVERTED = 3  # bytes that an element of an operand is read and written beside its product
_HEAD_BYTES = 28  # that an element of the logits is read and written, all passes of the loss together


@cache
def _shares() -> tuple[float, ...]:
    """Of the rate, by the bytes that a row of a matrix is over the largest multiple."""
    return tuple(
        next((share for multiple, share in ALIGNED if rest % multiple == 0), UNALIGNED) for rest in range(ALIGNED[0][0])
    )


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one microbatch; each array has an entry for each setup.

    Args:
        layer: forward and backward of a layer, with its messages.
        messages: of those, of ``tp``, and of ``cp`` that attention doesn't hide.
        launch: the least that the host lets a layer take.
        behind: the device takes longer than that.
        head: the output layer and the loss.
        embedding: what comes before the layers.
    """

    layer: Array
    messages: Array
    launch: Array
    behind: Flags
    head: Array
    embedding: Array


class LayerModel:
    """The costs of one model's layers on one kind of device."""

    def __init__(self, model: Transformer, machines: Machines, links: Links, precision: str) -> None:
        self._model, self._machines, self._links = model, machines, links
        self._peak = machines.device.peak_of(precision)
        self._matmul = self._peak * links.constants.matmul
        self._eighth = machines.device.peak_of("fp8") * links.constants.matmul
        self._attention = self._peak * links.constants.attention
        self._memory = machines.device.memory_rate * links.constants.memory

    def times(self, setups: Setups) -> LayerTime:
        """Of each setup."""
        one, waited = setups, self._links.latency(setups.tp)
        passed = self._links.neighbours(one.compute_bytes * one.tokens * self._model.hidden, one.tp)
        linears, core = self._linears(one), self._core(one, backward=False)
        forward = linears + core + self._forward_passes(one)
        backward = 2 * linears + self._core(one, backward=True) + self._backward_passes(one)
        again = np.where(one.full, forward, np.where(one.half, 0.5 * forward, np.where(one.selective, core, 0.0)))
        times = 4.0 + np.where(one.full, 2.0, np.where(one.half, 1.0, 0.0))
        beside = np.where(one.hidden, SHOWN, 1.0) * np.where(self._gathers_eighth(one), EIGHTH_MESSAGES, 1.0)
        messages = times * passed * beside + self._around(one)
        launch = self._launch(one)
        device = forward + again + backward + messages + times * waited
        layer = np.maximum(device, launch)
        head, embedding = self._head(one) + passed + waited, self._embedding(one) + passed + waited
        return LayerTime(layer, messages + times * waited, launch, device > launch, head, embedding)

    @staticmethod
    def _gathers_eighth(one: Setups) -> Flags:
        """Whether what ``tp`` gathers along the sequence is converted to 8 bits before, by each rank its part."""
        return one.fp8 & ~one.rowwise & one.parallel_sequence

    def _around(self, one: Setups) -> Array:
        """Keys and values go around the ranks of ``cp``, each turn beside attention on what has come (arXiv
        2310.01889); in backward their gradients go with them. What is computed again goes around again."""
        block = 2 * one.compute_bytes * one.tokens * self._model.kv_hidden / one.tp
        turn, turns = self._links.ring(block, one.cp, one.tp), one.cp - 1
        forward = np.maximum(0.0, turn - self._core(one, backward=False) / one.cp)
        backward = np.maximum(0.0, 2 * turn - self._core(one, backward=True) / one.cp)
        found: Array = turns * (forward * np.where(one.full | one.selective, 2.0, 1.0) + backward)
        return found

    def _launch(self, one: Setups) -> Array:
        constants, host = self._links.constants, self._machines.per_host
        parts = ~one.flash & ((one.micro * self._model.heads / one.tp) % SOFTMAX_HEADS != 0)
        launch = constants.launch_seconds * (3.0 + one.full) * np.where(parts, SOFTMAX_PARTS, 1.0)
        launch = launch * (1 + SLOWER * np.log2(one.tp))
        leaves = (one.pp > 1) & (one.dp * one.cp * one.tp * one.pp > host) & (one.tp > 1)
        stall = np.where(leaves, 3.0, 0.0) + np.where(one.tp > host, 0.15 * one.tp / host, 0.0)
        return launch + stall * one.tp * constants.stall_seconds

    def _product(self, rows: Array, columns: Array, inner: Array, one: Setups) -> Array:
        elements = rows * columns + rows * inner + columns * inner
        rate = self._matmul * self._whole(columns, one) * self._whole(inner, one)
        return np.maximum(
            2 * rows * columns * inner / rate, one.compute_bytes * elements / self._memory
        ) + KERNEL_SECONDS  # fmt: skip

    @staticmethod
    def _whole(size: Array, one: Setups) -> Array:
        """The share of the rate that is left by matrix rows of that many elements."""
        rest = size * one.compute_bytes % ALIGNED[0][0]  # all that the smaller ones need: they divide the largest
        places = rest.astype(np.int64)
        return np.where(places == rest, np.array(_shares())[places], UNALIGNED)

    def _linears(self, one: Setups) -> Array:
        model, tokens, whole = self._model, one.tokens, np.full_like(one.tp, self._model.hidden)
        part = whole / one.tp
        sizes = (  # columns, what each sums over, and what of that a rank has before it gathers
            ((model.hidden + 2 * model.kv_hidden) / one.tp, whole, part),
            (whole, part, part),
            (model.ups * model.ffn / one.tp, whole, part),
            (whole, model.ffn / one.tp, model.ffn / one.tp),
        )
        seconds = np.zeros(len(one))
        for columns, inner, had in sizes:
            usual, eighth = self._product(tokens, columns, inner, one), self._eighths(tokens, columns, inner, had, one)
            seconds = seconds + np.where(one.fp8, eighth, usual)
        return seconds

    def _eighths(self, rows: Array, columns: Array, inner: Array, had: Array, one: Setups) -> Array:
        """A product in 8 bits, with the conversion of its operands."""
        converted = rows * np.where(self._gathers_eighth(one), had, inner) + columns * inner
        rate = np.where(one.rowwise, self._matmul, self._eighth)
        return 2 * rows * columns * inner / rate + _CONVERTED * converted / self._memory + 3 * KERNEL_SECONDS

    def _core(self, one: Setups, backward: bool) -> Array:
        """Attention's two products, half of them where nothing after a token is looked at and the square isn't written;
        else its square is written and read by softmax and dropout."""
        flops = 4 * one.sequence * one.tokens * self._model.hidden / one.tp
        flops = flops / self._whole(np.full_like(one.tp, self._model.hidden / self._model.heads), one)
        square = one.compute_bytes * one.tokens * one.sequence * self._model.heads / one.tp
        fused = flops * (1.25 if backward else 0.5) / self._attention
        written = flops * (2 if backward else 1) / self._attention + square * (7 if backward else 5) / self._memory
        return np.where(one.flash, fused, written)

    def _passes(self, one: Setups, whole: float, inner: float, attention: float) -> Array:
        """Bytes of what runs element by element: beside cut layers, inside the feed-forward layer, inside attention."""
        beside = self._model.hidden / np.where(one.parallel_sequence, one.tp, 1.0) * whole
        inside = (self._model.ffn * inner + self._model.hidden * attention) / one.tp
        return one.compute_bytes * one.tokens * (beside + inside) / self._memory

    def _forward_passes(self, one: Setups) -> Array:
        return self._passes(one, 12, 2 + 2 * self._model.ups, 6) + FORWARD_KERNELS * KERNEL_SECONDS

    def _backward_passes(self, one: Setups) -> Array:
        return self._passes(one, 16, 3 + 4 * self._model.ups, 9) + BACKWARD_KERNELS * KERNEL_SECONDS

    def _head(self, one: Setups) -> Array:
        model = self._model
        columns = model.vocab / one.tp
        filled = np.where(one.tp == 1, columns, 128 * np.ceil(columns / 128))  # in parts the table is filled up
        product = self._product(one.tokens, filled, np.full_like(one.tp, model.hidden), one)
        logits = _HEAD_BYTES * one.tokens * columns / self._memory
        return 3 * product + logits + 1.5 * self._links.constants.launch_seconds

    def _embedding(self, one: Setups) -> Array:
        seconds = 6 * one.compute_bytes * one.tokens * self._model.hidden / self._memory
        return seconds + 0.5 * self._links.constants.launch_seconds
