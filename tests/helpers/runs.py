"""Starts runs as the command line does, over one fork server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.elastic.coordinator import Graces
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.order import TrainOrder
from stretto.plan import Plan


@contextmanager
def short_of_grace(launcher: LocalLauncher, graces: Graces) -> Iterator[None]:
    """Meanwhile the launcher gives its workers other graces; its fork server, which costs seconds, stays."""
    usual, launcher._graces = launcher._graces, graces
    try:
        yield
    finally:
        launcher._graces = usual


@dataclass
class Starter:
    """``notes`` has what the last start said on the way."""

    launcher: LocalLauncher
    notes: list[str] = field(default_factory=list)

    def start(
        self,
        run: Path,
        task: Path,
        plan: str,
        *,
        attempt: int = 1,
        stop: int | None = None,
        entry: str = "stretto.training:work",
        **sets: Any,
    ) -> JobResult:
        """One start of a run; every one after the first is a resume."""
        run.mkdir(exist_ok=True)
        self.notes.clear()
        order = TrainOrder(str(task), sets, plan, "test", str(run), attempt > 1, attempt, stop)
        job = Job(
            entry,
            order.to_payload(),
            Plan.parse(plan).world_size,
            prepare="stretto.training:prepare",
            first_member=1 + 10 * attempt,
            attempt=attempt,
            log_dir=run / "logs",
            python_path=(str(Path(__file__).parent),),
        )
        return self.launcher.run(job, lambda member, event: self._hear(event), lambda text: None)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "note":
            self.notes.append(event["text"])

    def good(self, *arguments: Any, **more: Any) -> JobResult:
        """A start that must end well."""
        result = self.start(*arguments, **more)
        assert result.exit_code == 0, result.failure
        return result

    def bad(self, *arguments: Any, **more: Any) -> str:
        """What a start said that must fail, and soon."""
        began = time.monotonic()
        result = self.start(*arguments, **more)
        took = time.monotonic() - began
        assert result.failure is not None and took < 10, took
        return result.failure.text
