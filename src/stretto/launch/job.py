"""What is asked of a launcher, and what comes back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.elastic.failure import Failure
from stretto.errors import Interrupted, LaunchError, one_line
from stretto.watch import HANG_AFTER_SECONDS


@dataclass(frozen=True)
class Job:
    """One piece of work for several workers.

    Args:
        entry: ``module:function``, called in each worker as ``function(payload, context)``; it returns an object that
            JSON can hold, or None.
        payload: what the entry and ``prepare`` are given; JSON.
        num_workers: exactly so many run, or none.
        prepare: ``module:function``, called once a host, before any worker, as ``function(payload, report)``. The
            workers share what it returns as ``context.prepared``, without a copy until they write to it. It may run
            torch operators, on one thread, but must not touch an accelerator or start threads.
        first_member: number of the first member; a resume goes on where the last start ended.
        attempt: how often the run was started, from 1.
        threads: threads of one worker's operators.
        log_dir: folder for ``member-ID.log``; without it workers print where the launcher prints.
        python_path: folders searched for modules first.
        safe_points: the workers look whether they shall end; else the first Ctrl-C or SIGTERM kills them.
        hang_after: seconds in which nothing moves until a job whose workers wait for one another is ended; 0: never.
    """

    entry: str
    payload: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1
    prepare: str | None = None
    first_member: int = 1
    attempt: int = 1
    threads: int = 1
    log_dir: Path | None = None
    python_path: tuple[str, ...] = ()
    safe_points: bool = True
    hang_after: float = HANG_AFTER_SECONDS

    def log_of(self, member: str) -> Path | None:
        """The file that takes what the member prints."""
        return None if self.log_dir is None else self.log_dir / f"member-{member}.log"

    def to_message(self) -> dict[str, Any]:
        """As a JSON object."""
        message = asdict(self)
        message["log_dir"] = None if self.log_dir is None else str(self.log_dir)
        return message

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Job:
        """Back from :meth:`to_message`."""
        log_dir = message["log_dir"]
        return cls(
            **{
                **message,
                "log_dir": None if log_dir is None else Path(log_dir),
                "python_path": tuple(message["python_path"]),
            }
        )


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Args:
        exit_code: 0 where every worker ended well; else the cause's own, 130 after Ctrl-C, 143 after SIGTERM.
        results: what each worker that ended well returned, by member.
        failure: the first bad end that was not the consequence of another.
    """

    exit_code: int
    results: dict[str, dict[str, Any] | None]
    failure: Failure | None = None


def result_of(result: JobResult, what: str) -> list[dict[str, Any]]:
    """What the workers of a job returned that has no safe points.

    Args:
        what: in words, such as "the links of 2 workers were not measured".

    Raises:
        Interrupted: it was.
        LaunchError: a worker ended badly.
    """
    if result.failure is not None:
        raise LaunchError(f"{what}: {one_line(result.failure)}")
    if result.exit_code:
        raise Interrupted(result.exit_code)
    return [found for found in result.results.values() if found is not None]


def resolve(reference: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Raises ImportError, AttributeError or ValueError."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise ValueError(f"expected module:function, got {reference!r}")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
