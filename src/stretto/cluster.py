"""Cluster: what there is to run on. Declared or measured; never part of the numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Args:
        hosts: machines.
        device: ``cpu`` or ``cuda``.
        cores: processor cores that this process may use, per host.
        memory_bytes: memory of a host; 0 where it can't be told.
    """

    hosts: int = 1
    device: str = "cpu"
    cores: int = 1
    memory_bytes: int = 0

    @classmethod
    def measure(cls, device: str = "cpu") -> Cluster:
        """This machine, as the kernel tells it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(hosts=1, device=device, cores=cores, memory_bytes=_memory_bytes())

    def threads_per_worker(self, workers: int) -> int:
        """Cores divided among the workers of one host, at least one each."""
        return max(1, self.cores // max(1, workers))


def _memory_bytes() -> int:
    try:
        first = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[0]
    except (OSError, IndexError):
        return 0
    return int(first.split()[1]) * 1024
