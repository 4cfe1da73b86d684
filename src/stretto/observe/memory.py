"""Memory: what this process has, and what is free."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_STATUS: Final = "/proc/self/status"
_CALLS: Final = MappingProxyType({"tcmalloc": "MallocExtension_ReleaseFreeMemory", "jemalloc": "mallctl"})


def rss_bytes(sharers: int = 1) -> int:
    """Resident memory now; 0 where the system doesn't tell.

    Args:
        sharers: as :func:`peak_rss_bytes` has them.
    """
    return (_field(_STATUS, "VmRSS:") or 0) - _of_others(sharers)


def peak_rss_bytes(sharers: int = 1) -> int:
    """The most resident memory this process ever had; 0 where the system doesn't tell.

    Args:
        sharers: how many processes have this one's shared memory between them; each answers for its part of it.
    """
    return (_field(_STATUS, "VmHWM:") or 0) - _of_others(sharers)


def allocator() -> str:
    """What this process takes its memory from: ``tcmalloc``, ``jemalloc``, or the ``C library``."""
    calls = ctypes.CDLL(None)
    return next((name for name, call in _CALLS.items() if hasattr(calls, call)), "C library")


def give_back() -> None:
    """Lets the allocator return to the system what was freed; nothing where it can't."""
    calls = ctypes.CDLL(None)
    match allocator():
        case "tcmalloc":
            calls.MallocExtension_ReleaseFreeMemory()
        case "jemalloc":
            calls.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))  # 4096 stands for all of them
        case _:
            with suppress(AttributeError):  # not every C library has it
                calls.malloc_trim(0)


def free_bytes(device: torch.device | None = None) -> int | None:
    """Memory that is free on ``device``: of an accelerator its own, of the CPU (the default) what the kernel calls
    available; None where the system doesn't tell."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return _field("/proc/meminfo", "MemAvailable:")


def _of_others(sharers: int) -> int:
    """The other processes' part of what is shared."""
    return (_field(_STATUS, "RssShmem:") or 0) * (sharers - 1) // sharers


def _field(path: str, name: str) -> int | None:
    """One of the kernel's figures in kB, as bytes."""
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
