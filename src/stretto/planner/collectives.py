"""How long messages take, by the rates of the links that they pass.

Ring forms (NCCL): an all-reduce of S bytes passes 2 (n - 1) / n x S over each link, a gather or a scatter half of it.
Where a group stands on several hosts, what is summed inside a host passes between hosts once, over the links of all
its members there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.planner.constants import Constants
from stretto.planner.hardware import Machines
from stretto.planner.setups import Array


@dataclass(frozen=True)
class Links:
    """The links of a cluster, as collectives find them."""

    machines: Machines
    constants: Constants

    @property
    def inside(self) -> float:
        """Bytes/s between devices of one host."""
        return self.machines.device.link_rate * self.constants.inside

    @property
    def between(self) -> float:
        """Bytes/s from one device to other hosts."""
        return self.machines.network_rate * self.constants.between

    def latency(self, ranks: Array) -> Array:
        """Of a collective, however small."""
        return self.constants.latency_seconds * np.log2(np.maximum(ranks, 1.0))

    def neighbours(self, num_bytes: Array, ranks: Array) -> Array:
        """An all-reduce over ranks that stand side by side, as ``tp``'s do, beside its latency; hosts are passed
        through in a ring."""
        host = float(self.machines.per_host)
        rate = np.where(ranks <= host, self.inside, min(self.inside, self.between * host))
        seconds = 2 * (ranks - 1) / ranks * num_bytes / rate
        return np.where(ranks > 1, seconds, 0.0)

    def spread(self, num_bytes: Array, ranks: Array, apart: Array) -> Array:
        """An all-reduce over ranks ``apart`` places from one another, as those of ``dp`` are by ``tp``."""
        here = np.clip(self.machines.per_host / apart, 1.0, ranks)
        hosts = ranks / here
        seconds = 2 * (here - 1) / here * num_bytes / self.inside
        seconds = seconds + np.where(hosts > 1, 2 * (hosts - 1) / hosts * num_bytes / here / self.between, 0.0)
        return np.where(ranks > 1, seconds + self.latency(ranks), 0.0)

    def send(self, num_bytes: Array, apart: Array) -> Array:
        """One message to a rank that many places on."""
        rate = np.where(apart >= self.machines.per_host, self.between, self.inside)
        return num_bytes / rate + self.constants.latency_seconds

    def ring(self, num_bytes: Array, ranks: Array, apart: Array) -> Array:
        """Seconds of each turn in which all of a ring hand a message on, as those of ``cp`` do: the slowest link's."""
        return self.send(num_bytes, np.where(ranks * apart > self.machines.per_host, self.machines.per_host, apart))
