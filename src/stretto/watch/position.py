"""A worker's position: what its main thread notes at each microbatch, and what is told of it when somebody asks.

The noting costs a few assignments and nothing else; all words are made by the thread that answers, from the main
thread's stack and the group's own books. So a run that nobody asks pays nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from stretto.watch.record import Phase, Record
from stretto.watch.stack import stand


class Position:
    """Written by the main thread, read by any."""

    def __init__(self) -> None:
        self.record = Record()
        self._samples: Sequence[int] = ()
        self._calls: Callable[[], tuple[str, int]] = lambda: ("", 0)
        self._awaited: Callable[[], dict[str, Any]] = dict

    def share(self) -> int:
        """Moves the record to where another process can read it; returns a descriptor for that process, to be closed
        here."""
        self.record, fd = Record.shared()
        return fd

    def begin(
        self, coordinates: str, calls: Callable[[], tuple[str, int]], awaited: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """A group is formed, with this worker at ``coordinates``.

        Args:
            calls: tells the collective that this member has begun and others have not, where that is known, and how
                many it has begun in all.
            awaited: tells the message from one other member that this one waits for, see `Group.awaited`.
        """
        self.record.coordinates, self._calls, self._awaited = coordinates, calls, awaited

    def at(self, phase: Phase, step: int, microbatch: int = 0, samples: Sequence[int] = ()) -> None:
        """Notes what begins now, with the sample ids of its microbatch (counted from 1)."""
        self._samples = samples
        self.record.at(phase, step, microbatch)

    def moved(self) -> None:
        """Notes that the same goes on, one piece further."""
        self.record.moved()

    def told(self) -> dict[str, Any]:
        """The answer to whoever asks; JSON. Any thread may call it."""
        moves = self.record.moves
        found = stand(sys._current_frames()[threading.main_thread().ident or 0])
        under_way, number = self._calls()
        awaited, waits_in = self._awaited(), ""
        if "what" in awaited:
            waits_in = awaited["what"]
        elif found.waits_in:
            waits_in = under_way or found.waits_in + (f" (call no. {number})" if number else "")
        samples = ", ".join(map(str, self._samples[:4])) + (", ..." if len(self._samples) > 4 else "")
        return {
            "moves": moves,
            "awaited": awaited,
            "mark": [number + awaited.get("passed", 0), waits_in, _written_bytes() if found.saves else 0],
            "waits_in": waits_in,
            "place": found.place,
            "loading": samples if found.loads else "",
        }


def _written_bytes() -> int:
    """What this process has handed to the system to write: a large checkpoint on a slow disk moves."""
    with suppress(OSError), open("/proc/self/io") as file:
        for line in file:
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
