"""All plans for a model on a cluster: what there is to choose from.

A plan is a core (degrees, microbatch, sequence parallelism, recomputation) and options beside it (schedule, chunks,
``zero``, hybrid sharding, offload). Cores decide what a microbatch costs; options only what stands around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stretto.errors import UserError
from stretto.planner.described import Described
from stretto.planner.hardware import Machines
from stretto.planner.setups import DEFAULTS, SCHEDULES, Array, Flags, Setups
from stretto.planner.software import Software

CHUNK: Final = 2**14  # cores that are looked at together, so that memory is bounded
Places = NDArray[np.int64]
_RECOMPUTE: Final = ((0, 0), (0, 1), (1, 0))  # full, selective: none, selective, full
_PLAIN: Final = SCHEDULES.index("1f1b")
_INTERLEAVED: Final = SCHEDULES.index("interleaved")


@dataclass(frozen=True)
class Options:
    """What may stand beside a core: a way to run stages, and a way to cut over dp. Not every core allows each.

    Args:
        schedule, chunks: of each way.
        zero, hybrid, offload: of each cut.
    """

    schedule: Array
    chunks: Array
    zero: Array
    hybrid: Flags
    offload: Flags

    @classmethod
    def every(cls, layers: int) -> Options:
        """1f1b first, then the other schedules, then interleaved with two and more stages on a rank."""
        ways = [(SCHEDULES.index(name), 1) for name in ("1f1b", "gpipe", "zero-bubble")]
        ways += [(_INTERLEAVED, chunks) for chunks in divisors(layers) if chunks > 1]
        zeros = [(0, False), (1, False), (2, False), (3, True), (3, False)]
        cuts = [(*one, offload) for one in zeros for offload in (False, True)]
        schedule, chunks = np.array(ways, float).T
        zero, hybrid, offload = np.array(cuts, float).T
        return cls(schedule, chunks, zero, hybrid > 0, offload > 0)


@dataclass(frozen=True)
class Space:
    """The plans of one model on one cluster.

    All devices are used, and ``dp x cp x tp x pp`` is their number. ``tp`` divides heads, heads of keys and values, and
    ffn; ``cp`` cuts a sequence into twice as many pieces (a rank has an early and a late one); ``pp`` is at most the
    layers; ``dp`` at most the batch, which need not be divisible: a rank has the rounded-up share at most. Of each size
    of a microbatch there is the least number of them. Stages of interleaved are as long as each other, and microbatches
    a multiple of ``pp`` (arXiv 2104.04473, section 2.2).

    Args:
        batch: samples of a step, of all ranks.
        system: what is known of the training system.
        context: with ``cp``.
    """

    described: Described
    machines: Machines
    batch: int
    system: Software
    context: bool = True

    def __post_init__(self) -> None:
        """Raises UserError for a batch of nothing."""
        if self.batch < 1:
            raise UserError(f"--batch must be at least 1, got {self.batch}")

    @cached_property
    def options(self) -> Options:
        """All of them."""
        return Options.every(self.described.model.layers)

    def degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """dp, tp, pp and cp."""
        model, count, sequence = self.described.model, self.machines.count, self.described.sequence
        context = self.context and self.system.flash
        for tp in divisors(count):
            if model.heads % tp or model.kv_heads % tp or model.ffn % tp:
                continue
            for pp in divisors(count // tp):
                if pp > model.layers:
                    continue
                for cp in divisors(count // tp // pp):
                    dp = count // tp // pp // cp
                    if dp <= self.batch and (cp == 1 or (context and sequence % (2 * cp) == 0)):
                        yield dp, tp, pp, cp

    @cached_property
    def cores(self) -> Setups:
        """All of them, with 1f1b, without zero and offload."""
        degrees = np.array(list(self.degrees()), float).reshape(-1, 4)
        sizes = {dp: np.array(microbatches(-(-self.batch // dp)), float) for dp in divisors(self.machines.count)}
        pieces = [sizes[int(dp)] for dp in degrees[:, 0]]
        table = np.repeat(degrees, [len(one) for one in pieces], axis=0)
        table = np.concatenate([table, np.concatenate([np.zeros((0, 2)), *pieces])], axis=1)
        ways = np.array([(cut, full, selective) for cut in (0, 1) for full, selective in _RECOMPUTE], float)
        table = np.concatenate([np.repeat(table, len(ways), axis=0), np.tile(ways, (len(table), 1))], axis=1)
        table = table[(table[:, 1] > 1) | (table[:, 6] == 0)]
        dp, tp, pp, cp, micro, count, cut, full, selective = np.ascontiguousarray(table.T)
        return self.setups(
            {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "parallel_sequence": cut > 0, "micro": micro}
            | {"microbatches": count, "full": full > 0, "selective": selective > 0}
        )

    @cached_property
    def candidates(self) -> int:
        """How many plans there are."""
        found = 0
        for start in range(0, len(self.cores), CHUNK):
            ways, cuts = self.allowed(self.cores.take(slice(start, start + CHUNK)))
            found += int((ways.sum(axis=1) * cuts.sum(axis=1)).sum())
        return found

    def setups(self, columns: Mapping[str, Any]) -> Setups:
        """With what the model, the precision and the training system settle."""
        number, precision = len(columns["dp"]), self.described.precision
        width = 4.0 if precision in ("fp32", "tf32") else 2.0
        plain: dict[str, Any] = {
            "chunks": 1.0,
            "zero": 0.0,
            "sequence": float(self.described.sequence),
            "flash": self.system.flash,
            "hidden": False,
            "fp8": precision == "fp8",
            "overlapped": self.system.overlapped,
            "compute_bytes": width,
            "gradient_bytes": max(width, float(self.system.gradient_bytes)),
        }
        plain = {**DEFAULTS, **plain}
        kinds = {field.name: bool if field.type == "Flags" else float for field in dataclasses.fields(Setups)}
        filled = {name: np.full(number, value, kinds[name]) for name, value in plain.items()}
        return Setups(**{**filled, "shard": columns["dp"], **columns})

    def allowed(self, cores: Setups) -> tuple[Flags, Flags]:
        """Whether a core allows a way to run stages, and a way to cut over dp. [cores, ways], [cores, cuts]"""
        options, layers = self.options, self.described.model.layers
        pp, dp, inside = cores.pp[:, None], cores.dp[:, None], self.inside(cores)[:, None]
        even = (layers % (pp * options.chunks) == 0) & (cores.microbatches[:, None] % pp == 0)
        ways = ((options.chunks == 1) | even) & ((pp > 1) | (options.schedule == _PLAIN))
        hybrid = (inside > 1) & (inside < dp) & (dp % inside == 0)
        return ways, ((dp > 1) | (options.zero == 0)) & (hybrid | ~options.hybrid)

    def inside(self, cores: Setups) -> Array:
        """Ranks of dp in one host."""
        return np.maximum(1.0, np.floor(self.machines.per_host / (cores.tp * cores.cp)))

    def join(self, cores: Setups, way: Places, cut: Places) -> Setups:
        """Each core with the options at these places, of those that :meth:`allowed` lists."""
        chosen = self.options
        shard = np.where(chosen.hybrid[cut], self.inside(cores), cores.dp)
        around = dataclasses.replace(cores, schedule=chosen.schedule[way], chunks=chosen.chunks[way])
        return dataclasses.replace(around, zero=chosen.zero[cut], shard=shard, offload=chosen.offload[cut])


def divisors(number: int) -> list[int]:
    """In ascending order."""
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def microbatches(samples: int) -> list[tuple[int, int]]:
    """Of each size that a rank's samples can be cut into, the least number of pieces: (size, number)."""
    found, count = [], 1
    while True:
        size = -(-samples // count)
        found.append((size, count))
        if size == 1:
            return found
        count = -(-samples // (size - 1))  # the least that makes them smaller
