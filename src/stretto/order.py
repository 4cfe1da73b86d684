"""What the command line asks of the workers. Needs no torch, so that a launcher can write it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stretto.watch import HANG_AFTER_SECONDS


@dataclass(frozen=True)
class TrainOrder:
    """What ``stretto train`` and ``stretto resume`` ask of the workers; plain JSON.

    Args:
        task: path of the task.
        sets: values by name, text as on the command line or typed as in ``resolved.yaml``.
        plan: as text.
        plan_origin: where the plan came from, for people.
        run: the run folder; exists, and is locked by the launcher.
        resume: go on from the newest whole checkpoint.
        attempt: counts the starts of the run from 1.
        stop_after: last step to commit in this start.
        force: train even where the probes refuse the plan.
        forecast: what was predicted; see :class:`stretto.forecast.Forecast`.
        hang_after: seconds without any movement after which the run is ended; 0: never.
    """

    task: str
    sets: dict[str, Any]
    plan: str
    plan_origin: str
    run: str
    resume: bool = False
    attempt: int = 1
    stop_after: int | None = None
    force: bool = False
    forecast: dict[str, Any] | None = None
    hang_after: float = HANG_AFTER_SECONDS

    def to_payload(self) -> dict[str, Any]:
        """As a job's payload."""
        return asdict(self)
