"""How long a layer takes on a device: its operations counted, each by what binds it.

A product of matrices takes its flops at the device's rate or its bytes at the memory's, whichever is longer; other
operations take their bytes. All of a layer takes at least what the host needs to launch it, which binds where layers
are cut small. Flops and bytes follow arXiv 2205.05198, section 4, and 2104.04473, appendix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.planner.collectives import Links
from stretto.planner.hardware import Machines
from stretto.planner.setups import Array, Setups
from stretto.planner.transformer import Transformer

KERNEL_SECONDS = 3e-5  # of any operation on a device beside its work: its start, its end, the gap to the next
FORWARD_KERNELS, BACKWARD_KERNELS = 10, 16  # element by element
# Of the rate, by the bytes of which a row of a matrix is a multiple (arXiv 2401.14489, section 4); below all, the last.
ALIGNED = ((128, 1.0), (64, 0.95), (32, 0.85), (16, 0.65))
UNALIGNED = 0.3
OVER = 0.15
UNFUSED = 1.3  # of the launches of a layer, where attention's softmax runs as its parts
SHOWN = 0.6  # of messages that go in pieces beside products: the first and the last piece, and what they slow down
_CONVERTED = 3  # bytes that an element of an operand is read and written beside its product
_HEAD_BYTES = 28  # that an element of the logits is read and written, all passes of the loss together


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one microbatch; each array has an entry for each setup.

    Args:
        layer: forward and backward of a layer, with its messages.
        messages: of those.
        launch: the least that the host lets a layer take.
        head: the output layer and the loss.
        embedding: what comes before the layers.
    """

    layer: Array
    messages: Array
    launch: Array
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
        model, one = self._model, setups
        message = one.compute_bytes * one.tokens * model.hidden
        passed = self._links.neighbours(message, one.tp)
        waited = self._links.latency(one.tp)
        forward = self._linears(one) + self._core(one, backward=False) + self._forward_passes(one)
        backward = 2 * self._linears(one) + self._core(one, backward=True) + self._backward_passes(one)
        times = 4.0 + 2.0 * one.full + np.where(one.half, 1.0, 0.0)
        eighth = one.fp8 & ~one.rowwise & one.parallel_sequence  # what is gathered is converted before
        messages = times * passed * np.where(one.hidden, SHOWN, 1.0) * np.where(eighth, 0.75, 1.0)
        selective = np.where(one.half, 0.5 * forward, np.where(one.selective, self._core(one, backward=False), 0.0))
        again = np.where(one.full, forward, selective)
        launch = self._launch(one)
        layer = np.maximum(forward + again + backward + messages, launch) + times * waited
        head, embedding = self._head(one) + passed + waited, self._embedding(one) + passed + waited
        return LayerTime(layer, messages + times * waited, launch, head, embedding)

    def _launch(self, one: Setups) -> Array:
        constants, host = self._links.constants, self._machines.per_host
        launch = constants.launch_seconds * (3.0 + one.full)
        unfused = ~one.flash & ((one.micro * self._model.heads / one.tp) % 4 != 0)
        launch = launch * np.where(unfused, UNFUSED, 1.0)
        leaves = (one.pp > 1) & (one.dp * one.tp * one.pp > host) & (one.tp > 1)
        stall = np.where(leaves, 3.0, 0.0) + np.where(one.tp > host, OVER * one.tp / host, 0.0)
        return launch + stall * one.tp * constants.stall_seconds

    def _product(self, rows: Array, columns: Array, inner: Array, one: Setups) -> Array:
        elements = rows * columns + rows * inner + columns * inner
        rate = self._matmul * self._whole(columns, one) * self._whole(inner, one)
        return np.maximum(
            2 * rows * columns * inner / rate, one.compute_bytes * elements / self._memory
        ) + KERNEL_SECONDS  # fmt: skip

    @staticmethod
    def _whole(size: Array, one: Setups) -> Array:
        """The share of the rate that is left by rows of that many elements."""
        found = np.full_like(one.tp, UNALIGNED)
        for multiple, share in reversed(ALIGNED):
            found = np.where(size * one.compute_bytes % multiple == 0, share, found)
        return found

    def _linears(self, one: Setups) -> Array:
        model, tokens, whole = self._model, one.tokens, np.full_like(one.tp, self._model.hidden)
        sizes = (
            ((model.hidden + 2 * model.kv_hidden) / one.tp, whole),
            (whole, whole / one.tp),
            (model.ups * model.ffn / one.tp, whole),
            (whole, model.ffn / one.tp),
        )
        seconds = np.zeros(len(one))
        cut = np.where(one.parallel_sequence & ~one.rowwise, one.tp, 1.0)
        for columns, inner in sizes:
            converted = _CONVERTED * (tokens * np.maximum(inner / cut, model.hidden / one.tp) + columns * inner) / self._memory
            rate = np.where(one.rowwise, self._matmul, self._eighth)
            eighth = 2 * tokens * columns * inner / rate + converted + 3 * KERNEL_SECONDS
            seconds = seconds + np.where(one.fp8, eighth, self._product(tokens, columns, inner, one))
        return seconds

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
