"""What a rank was about, and when: spans that it notes itself. Noting costs a microsecond, so it is always on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

KEPT_STEPS: Final = 8  # of the last steps every span is kept; of the others sums


@dataclass(frozen=True, slots=True)
class Noted:
    """One span, in seconds of the host's monotonic clock.

    Args:
        what: such as ``forward``, ``backward``, ``weights``, ``send``, ``receive``, ``reduce``, ``vote``, ``update``.
        stage: of a pipeline; None without one.
        microbatch: counted from 0; None for what belongs to none.
    """

    what: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None


class Lanes:
    """The spans of one rank. Spans don't overlap; what lies between them is idle time."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, list[Noted]]] = deque(maxlen=KEPT_STEPS)
        self.seconds: dict[tuple[str, int | None], float] = {}  # by what and stage, over all steps but the first
        self.counts: dict[tuple[str, int | None], int] = {}
        self.running = 0.0  # seconds from the first to the last work on microbatches, likewise
        self._now: list[Noted] = []
        self._begun = False

    @contextmanager
    def span(self, what: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Surrounds what is noted."""
        start = time.perf_counter()
        yield
        self._now.append(Noted(what, start, time.perf_counter(), stage, microbatch))

    def step_done(self, step: int) -> None:
        """A step is committed. The first is kept out of the sums: memory and caches are cold."""
        spans, self._now = self._now, []
        self.steps.append((step, spans))
        if not self._begun:
            self._begun = True
            return
        for span in spans:
            key = span.what, span.stage
            self.seconds[key] = self.seconds.get(key, 0.0) + span.end - span.start
            self.counts[key] = self.counts.get(key, 0) + 1
        work = [span for span in spans if span.microbatch is not None]
        if work:
            self.running += work[-1].end - work[0].start

    def dropped(self) -> None:
        """An attempt at a step was voted down."""
        self._now = []
