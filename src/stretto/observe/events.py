"""One member's events, a JSON object a line, in ``events/member-ID.jsonl``."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from stretto.errors import UserError


class LineFile:
    """A file that grows by whole JSON lines, each handed to the system in one write, so a kill loses none it had."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(self._fd).st_size and path.read_bytes()[-1:] != b"\n":
            os.write(self._fd, b"\n")  # a line that a kill or a full disk cut short stays by itself

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line. Raises UserError where the disk takes no more."""
        line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; free some space, then resume") from error

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a :class:`LineFile`; a line that a kill cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class EventLog:
    """Writes the events of one member of a run."""

    def __init__(self, run: Path, member: str) -> None:
        self._file = LineFile(run / "events" / f"member-{member}.jsonl")

    def write(self, kind: str, **values: Any) -> None:
        """Adds one event with the wall-clock time in seconds; what isn't finite is written as text."""
        shown = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        self._file.append({"time": round(time.time(), 6), "kind": kind, **shown})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
