"""How far a run has come, how fast it goes and when it will be done, as one line."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from stretto.cli.words import clock, count, measures

if TYPE_CHECKING:
    from rich.text import Text

_WINDOW_STEPS = 50
_WARM_UP_STEPS = 1  # the first step pays for what is set up once
_PLAIN_LINES = 10  # a run
_PLAIN_SECONDS = 10.0  # at least a line so often, so that a log shows life
_BAR_COLUMNS = 20


class Progress:
    """Fed with the events ``start`` and ``step``."""

    def __init__(self) -> None:
        self.steps = 0
        self._unit = "samples"
        self._event: dict[str, Any] = {"step": 0, "loss": math.nan, "metrics": {}}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW_STEPS)  # seconds, units of loss weight
        self.first_step = 1
        self._told_step = 0
        self._told_time = -math.inf

    def begin(self, event: dict[str, Any]) -> None:
        """A run starts, or goes on."""
        self.steps, self._unit = event["steps"], event["unit"]
        self.first_step = event["first_step"]
        self._told_step = self.first_step - 1

    def step(self, event: dict[str, Any]) -> None:
        """A step was committed."""
        self._event = event
        if event["step"] >= self.first_step + _WARM_UP_STEPS:
            self._recent.append((event["seconds"], event["weight"]))

    @property
    def at_end(self) -> bool:
        """Whether that was the last step."""
        return bool(self._event["step"] >= self.steps)

    def line_due(self, now: float) -> bool:
        """Whether a plain line is due: each tenth of the steps, or after a long silence."""
        step = self._event["step"]
        tenth = _PLAIN_LINES * step // max(1, self.steps) > _PLAIN_LINES * self._told_step // max(1, self.steps)
        if not (tenth or self._told_time == -math.inf or now - self._told_time >= _PLAIN_SECONDS):
            return False
        self._told_step, self._told_time = step, now
        return True

    def text(self) -> str:
        """``step 20/250  loss 0.8114  5,120 samples/s  0:04 left``."""
        return "  ".join(part for part, _ in self._parts() if part)

    def render(self, width: int, *, busy: bool = True) -> Text:
        """The same with a bar where it fits in ``width`` columns; ``busy``: the run hasn't ended."""
        from rich.text import Text

        parts = self._parts() if busy else self._parts()[:3]  # nothing is "left" of what has ended
        plain = sum(len(part) + 2 for part, _ in parts)
        line = Text(overflow="ellipsis", no_wrap=True)
        line.append(parts[0][0], "bold")
        if plain + _BAR_COLUMNS + 2 <= width:
            done = round(_BAR_COLUMNS * self._event["step"] / max(1, self.steps))
            line.append("  " + "━" * done, "cyan").append("━" * (_BAR_COLUMNS - done), "bright_black")
        for text, style in parts[1:]:
            line.append(f"  {text}" if text else "", style)
        return line.append("  evaluating and saving ...", "dim") if self.at_end and busy else line

    def _parts(self) -> list[tuple[str, str]]:
        step, width = self._event["step"], len(f"{self.steps:,}")
        found = [
            (f"step {step:>{width},}/{self.steps:,}", "bold"),
            (measures({"loss": self._event["loss"], **self._event["metrics"]}), ""),
        ]
        if step >= self.first_step + _WARM_UP_STEPS:
            seconds = max(1e-9, sum(each for each, _ in self._recent))
            left = (self.steps - step) * seconds / len(self._recent)
            found.append((f"{count(sum(units for _, units in self._recent) / seconds)} {self._unit}/s", "dim"))
            found.append((f"{clock(left)} left" if step < self.steps else "", "dim"))
        return found
