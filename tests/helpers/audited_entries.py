"""Entries that run the engine's own work while they watch what it does to the disk."""

from __future__ import annotations

import os
import sys
from typing import Any

from stretto.launch import WorkerContext
from stretto.training import work


def writes(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Trains; returns which files this process opened to write, and what it renamed, below the run folder."""
    folder = os.path.abspath(payload["run"])
    opened: list[str] = []
    renamed: list[list[str]] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(os.fsdecode(arguments[0])) if not isinstance(arguments[0], int) else ""
            opened.extend([path] if path.startswith(folder) else [])
        elif event == "os.rename":
            renamed.append([os.path.abspath(os.fsdecode(each)) for each in arguments[:2]])

    sys.addaudithook(hook)
    work(payload, context)
    return {"opened": opened, "renamed": renamed}
