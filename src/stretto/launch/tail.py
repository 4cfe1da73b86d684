"""The terminal's view of one log file."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path


class Tail:
    """Hands on what is appended to a file from now on.

    A worker writes straight to its log, which so is whole whatever becomes of the launcher; the launcher reads along.
    """

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self._path = path
        self._show = show
        self._offset = path.stat().st_size if path.exists() else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def follow(self) -> None:
        """Shows what has come since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):  # not yet
            return
        self._offset += len(data)
        if text := self._decoder.decode(data):
            self._show(text)
