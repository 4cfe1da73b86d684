"""Starts a job for a command and tells of it: what ``train``, ``resume`` and ``run`` share. Loads no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stretto.cli.options import SEEN_ONCE, shown_path
from stretto.errors import one_line
from stretto.runfolder import RESOLVED_NAME, FolderLock, create_run_folder

if TYPE_CHECKING:
    from stretto.cli.display import Display
    from stretto.launch import JobResult, LocalLauncher
    from stretto.order import TrainOrder
    from stretto.plan import Plan


@dataclass(frozen=True)
class Launch:
    """One start of a run.

    Args:
        order: what the workers are asked.
        plan: the order's, parsed.
        task: as a person would type it.
        sets: as given, to be repeated in the commands to try.
        first_member: the number of the first member.
        notes: to say first; empty ones are left out.
    """

    order: TrainOrder
    plan: Plan
    task: str
    sets: tuple[str, ...]
    first_member: int = 1
    notes: Sequence[str] = ()


class HeldFolder:
    """A run folder that no other command can use meanwhile. One in which nothing was begun is taken away again."""

    def __init__(self, path: Path, *, made: bool = False) -> None:
        """Raises UserError where another process holds the folder."""
        self.path = path
        self._made = made
        self._lock = FolderLock(path)

    @classmethod
    def new(cls, wanted: Path | None, name: str) -> HeldFolder:
        """For a new run, in ``wanted`` or the next free ``runs/NAME``."""
        if wanted is not None and (wanted / ".lock").exists():
            FolderLock(wanted).release()  # "in use" says more than "holds a run already"
        existed = wanted is not None and wanted.exists()
        return cls(create_run_folder(wanted, name), made=not existed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made and not (self.path / RESOLVED_NAME).exists():
            self._take_away()
        self._lock.release()

    def _take_away(self) -> None:
        try:
            for log in (self.path / "logs").glob("member-*.log"):
                if log.stat().st_size == 0:
                    log.unlink()
            if (self.path / "logs").is_dir():
                (self.path / "logs").rmdir()
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
        except OSError:
            return  # something is in it; it stays


def has_checkpoint(run: Path) -> bool:
    """Whether a checkpoint was committed in the run folder; whether it is whole, its reader finds out."""
    return any((run / "checkpoints").glob("step-*/manifest.json"))


def launch_training(launch: Launch, *, quiet: bool, launcher: LocalLauncher | None = None) -> int:
    """Runs an order's workers to their end, showing what they tell. Returns the exit code.

    Args:
        launcher: one that runs already, if there is any.
    """
    from stretto.cli.display import Display
    from stretto.cluster import Cluster
    from stretto.launch import Job, LocalLauncher
    from stretto.preload import preloads

    workers = launch.plan.world_size
    run = Path(launch.order.run)
    with launcher or LocalLauncher(preloads(launch.plan)) as started, Display(quiet=quiet) as display:
        display.starting(workers)
        for note in filter(None, launch.notes):
            display.note(note)
        job = Job(
            entry="stretto.training:work",
            payload=launch.order.to_payload(),
            num_workers=workers,
            prepare="stretto.training:prepare",
            first_member=launch.first_member,
            attempt=launch.order.attempt,
            threads=Cluster.measure().threads_per_worker(workers),
            hang_after=launch.order.hang_after,
            log_dir=run / "logs",
        )
        result = started.run(job, display.on_event, display.on_output)
        if result.failure is None:
            display.next_commands(next_commands(launch, display.finished))
    return conclude(result, display, run)


def conclude(result: JobResult, display: Display, run: Path | None) -> int:
    """Says how a job ended where that is not good, the cause last. Returns the exit code."""
    sys.stdout.flush()
    can_resume = run is not None and has_checkpoint(run)
    resume = f"stretto resume {shlex.quote(shown_path(run))}" if run is not None else ""
    failure = result.failure
    if failure is None:
        if result.exit_code and display.summary is None:
            kept = f"; go on with: {resume}" if can_resume else "; no checkpoint had been written" if resume else ""
            print(f"stretto: interrupted{kept}", file=sys.stderr)
        return result.exit_code
    if failure.kind == "user":
        print(f"stretto: {one_line(failure.text)}", file=sys.stderr)
        return result.exit_code
    if can_resume:
        print(f"A checkpoint is kept. Once the cause is mended, go on with: {resume}\n", file=sys.stderr)
    print(failure, file=sys.stderr)
    return result.exit_code


def next_commands(launch: Launch, finished: bool) -> list[tuple[str, str]]:
    """Commands to try next, each with what it is for."""
    run, task, plan = shlex.quote(shown_path(launch.order.run)), shlex.quote(launch.task), launch.plan
    sets = "".join(f" --set {shlex.quote(each)}" for each in launch.sets)
    proof = plan if plan.world_size > 1 else "dp=2"
    other = f"dp={plan.dp}" if plan.zero else f"dp={max(2, plan.dp)},zero=3"
    found = [] if finished else [(f"stretto resume {run}", "goes on from here")]
    if not finished and plan.world_size > 1:
        found.append((f"stretto resume {run} --workers 1", "on another number of workers"))
    found.append((f"stretto audit {run}", SEEN_ONCE))
    found.append((f"stretto verify {task} --plan {proof}{sets}", "are these one device's numbers?"))
    if finished:
        why = "the same, whole on each worker" if plan.zero else "the same, everything sharded"
        found.append((f"stretto train {task} --plan {other}{sets}", why))
    return found
