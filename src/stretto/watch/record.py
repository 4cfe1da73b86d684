"""A small record of where a worker is, in memory that its launcher sees too: also of one that is stopped or dead."""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Final, Self

_WORDS, _COORDINATES, _BYTES = 64, 64, 256
_STEP, _MICROBATCH, _PHASE, _MOVES = range(4)


class Phase(IntEnum):
    """What a worker is about."""

    BEFORE = 0
    MICROBATCH = 1
    REDUCE = 2
    VOTE = 3
    AFTER = 4
    EVALUATE = 5


_SAID: Final = (
    "before its first step",
    "in step",
    "reducing the gradients of step",
    "voting on step",
    "after step",
    "in the evaluation after step",
)


class Record:
    """One process writes, any may read. Writing costs a few stores and no call of the system."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(_BYTES) if memory is None else memory
        self._words = memoryview(self._memory)[:_WORDS].cast("q")

    @classmethod
    def shared(cls) -> tuple[Self, int]:
        """A new one, and a descriptor to hand to whoever shall read it; the caller closes it."""
        fd = os.memfd_create("stretto-watch")
        os.ftruncate(fd, _BYTES)
        return cls.of(fd), fd

    @classmethod
    def of(cls, fd: int) -> Self:
        """The one that ``fd`` leads to."""
        return cls(mmap.mmap(fd, _BYTES))

    @property
    def moves(self) -> int:
        """Grows with every piece of work."""
        return self._words[_MOVES]

    @property
    def coordinates(self) -> str:
        """The worker's place on the mesh, such as ``dp=1``; empty before it is known."""
        return bytes(self._memory[_COORDINATES:_BYTES]).rstrip(b"\0").decode(errors="replace")

    @coordinates.setter
    def coordinates(self, text: str) -> None:
        self._memory[_COORDINATES:_BYTES] = text.encode()[: _BYTES - _COORDINATES].ljust(_BYTES - _COORDINATES, b"\0")

    def at(self, phase: Phase, step: int, microbatch: int) -> None:
        """Notes what begins now."""
        words = self._words
        words[_STEP], words[_MICROBATCH], words[_PHASE] = step, microbatch, phase
        words[_MOVES] += 1

    def moved(self) -> None:
        """Notes that the same goes on, one piece further."""
        self._words[_MOVES] += 1

    def doing(self) -> str:
        """In words: ``in step 3, microbatch 1``."""
        step, microbatch, phase = self._words[_STEP], self._words[_MICROBATCH], Phase(self._words[_PHASE])
        if phase is Phase.BEFORE:
            return _SAID[phase]
        return f"{_SAID[phase]} {step}" + (f", microbatch {microbatch}" if microbatch else "")
