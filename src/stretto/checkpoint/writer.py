"""Saving in the background: training waits for the copy to memory and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stretto.checkpoint.commit import Place, SaveCancelled, abandon, commit, write_member
from stretto.checkpoint.manifest import private_json
from stretto.checkpoint.names import step_name
from stretto.checkpoint.points import OnPoint, no_point
from stretto.checkpoint.snapshot import Snapshot
from stretto.checkpoint.tidy import prune, sweep
from stretto.errors import CheckpointError


def _nothing(step: int, path: Path) -> None:
    """The default: nobody is told of a commit."""


class CheckpointWriter:
    """Writes snapshots into ``RUN/checkpoints``, one at a time, in a thread of its own.

    Every member has one. Saves enter no collective, so members need not call together; but all members of a
    snapshot must call, or the committer gives up after ``timeout_seconds``.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        on_point: OnPoint = no_point,
        on_commit: Callable[[int, Path], None] = _nothing,
        timeout_seconds: float = 600.0,
    ) -> None:
        """``keep``: how many whole checkpoints stay. ``on_commit(step, path)`` is called on the committer,
        in the background thread, once the checkpoint is safe on the disk; ``on_point(name)`` at each point
        of a save.
        """
        if keep < 1:
            raise ValueError(f"expected to keep at least 1 checkpoint, got {keep}")
        self._folder = folder
        self._keep = keep
        self._on_point = on_point
        self._on_commit = on_commit
        self._timeout_seconds = timeout_seconds
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, snapshot: Snapshot) -> None:
        """Starts to write a snapshot and returns at once; an unfinished earlier save is waited for first.

        Raises:
            CheckpointError: the *earlier* save failed, or ``meta`` is not JSON.
        """
        self.wait()
        try:
            snapshot = replace(snapshot, meta=private_json(snapshot.meta))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"what a run keeps in a checkpoint must be JSON: {error}") from error
        self._cancelled.clear()
        # A daemon, so that a worker that ends on an error is not held by a save that can't finish; who
        # wants the save calls wait().
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="stretto-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the save in progress has ended: on the committer it is committed, on others written.

        Raises:
            CheckpointError: it failed; the unfinished folder is removed, earlier checkpoints are untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        """Gives up a save that waits for other members (one of them died); wait() then returns without an
        error.
        """
        self._cancelled.set()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # handed to the caller of wait()
            self._failure = error

    def _write(self, snapshot: Snapshot) -> None:
        place = Place(self._folder, snapshot, self._on_point)
        try:
            write_member(place)
            if snapshot.committer:
                commit(place, self._timeout_seconds, self._cancelled)
        except SaveCancelled:
            abandon(place, "cancelled")
            return
        except FileNotFoundError as error:
            if snapshot.committer or place.partial.exists():
                raise self._failed(place, error) from error
            return  # the committer gave this save up, and says why itself
        except OSError as error:
            raise self._failed(place, error) from error
        except BaseException as error:
            abandon(place, str(error))
            raise
        if snapshot.committer:
            self._finish(place)

    def _finish(self, place: Place) -> None:
        step, token = place.snapshot.step, place.snapshot.token
        self._on_commit(step, place.final)
        self._on_point("acknowledged")
        try:
            prune(self._folder, step, self._keep, token, self._on_point, place.snapshot.pinned)
            self._on_point("pruned")
            sweep(self._folder, step)
            self._on_point("swept")
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {step_name(step)} is saved, but an older one could not be deleted: {error}"
            ) from error

    def _failed(self, place: Place, error: OSError) -> CheckpointError:
        reason = error.strerror or str(error)
        abandon(place, reason)
        return CheckpointError(
            f"cannot write checkpoint {step_name(place.snapshot.step)} in {self._folder}: {reason}; make "
            "room or mend it, then resume: earlier checkpoints are untouched"
        )
