"""Resident memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def rss_bytes() -> int:
    """Resident memory now; 0 where the system doesn't tell."""
    return _status("VmRSS:")


def peak_rss_bytes() -> int:
    """The most resident memory this process ever had; 0 where the system doesn't tell."""
    return _status("VmHWM:")


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
