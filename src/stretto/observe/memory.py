"""Memory: what this process has, and what is free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rss_bytes() -> int:
    """Resident memory now; 0 where the system doesn't tell."""
    return _status("VmRSS:")


def peak_rss_bytes(sharers: int = 1) -> int:
    """The most resident memory this process ever had; 0 where the system doesn't tell.

    Args:
        sharers: how many processes have this one's shared memory between them; each answers for its part of it.
    """
    return _status("VmHWM:") - _status("RssShmem:") * (sharers - 1) // sharers


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on ``device``: of an accelerator its own, of the CPU what the kernel calls available."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
