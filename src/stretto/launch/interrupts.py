"""Signals as something to wait on, so that a launcher never loses one between two of its steps."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, SIGINT and SIGTERM raise nothing; they are read from here. Elsewhere than in the main thread,
    where Python delivers no signals, none come."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, _ignore) for number in _WATCHED}
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The watched signals that have come, in order."""
        try:
            return [number for number in os.read(self._reader.fileno(), 4096) if number in _WATCHED]
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor says what there is to say."""
