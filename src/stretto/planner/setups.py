"""Ways to train one model, side by side: each field is an array with an entry for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")
DEFAULTS: Final = MappingProxyType(
    {"cp": 1, "schedule": SCHEDULES.index("1f1b"), "offload": False, "half": False, "rowwise": False}
    | {"overlapped": False}
)


@dataclass(frozen=True)
class Setups:
    """What a plan and a recipe say of a step, for many at once.

    Args:
        dp: data-parallel ranks; ``tp``, ``pp``: of those axes.
        cp: of context parallelism, which cuts a sequence; ``shard``: of dp's, those that ``zero`` cuts over.
        chunks: stages on each rank of ``pp``; ``schedule``: its place in ``SCHEDULES``.
        zero: 0 to 3.
        micro: samples of a microbatch; ``microbatches``: of a rank's step.
        sequence: tokens of a sample.
        parallel_sequence: activations between cut layers lie in parts along the sequence.
        full: each layer is computed again in backward; ``selective``: its attention is.
        half: about half of each layer is, as torchtitan's ``selective`` does (every second product, or layer).
        flash: attention never writes its square.
        hidden: messages of ``tp`` go in pieces beside the products that they feed (asynchronous tensor parallelism).
        offload: what the optimizer keeps lies on the host.
        fp8: products of layers run in 8 bits, whose operands are converted before each; ``rowwise``: with a scale for
            each row, so that products are no faster than in 16 bits.
        overlapped: gradients are added up beside the last microbatch's backward.
        compute_bytes: of an element in forward and backward; ``gradient_bytes``: of one that is sent.
    """

    dp: Array
    tp: Array
    pp: Array
    chunks: Array
    zero: Array
    micro: Array
    microbatches: Array
    sequence: Array
    parallel_sequence: Flags
    full: Flags
    selective: Flags
    flash: Flags
    hidden: Flags
    fp8: Flags
    compute_bytes: Array
    gradient_bytes: Array
    cp: Array
    shard: Array
    schedule: Array
    offload: Flags
    half: Flags
    rowwise: Flags
    overlapped: Flags

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Setups:
        """Of one mapping of the fields for each; those of ``DEFAULTS`` may be left out."""
        found = {}
        for field in fields(cls):
            kind = bool if field.type == "Flags" else float
            values = [row.get(field.name, DEFAULTS.get(field.name)) for row in rows]
            if field.name == "shard":
                values = [row["dp"] if value is None else value for row, value in zip(rows, values, strict=True)]
            found[field.name] = np.array(values, kind)
        return cls(**found)

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def tokens(self) -> Array:
        """Of a microbatch that a rank has."""
        return self.micro * self.sequence / self.cp

    def take(self, at: Any) -> Setups:
        """Those at these places."""
        return Setups(**{field.name: getattr(self, field.name)[at] for field in fields(self)})
