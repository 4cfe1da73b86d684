"""A run, seen from its loop: the five calls ``start``, ``batches``, ``step``, ``log`` and ``finish``.

``stretto train`` is a loop over these calls like any user's. Every worker makes the same calls in the same order; one
call of ``step`` is one global batch and one committed step. Between two batches lies the only safe point, where a run
is saved and left.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import takewhile, tee
from pathlib import Path
from typing import Any

from stretto.assemble import aside_on, assemble, disassemble, fitting, open_data, retyped_notes
from stretto.best import BestSoFar
from stretto.checkpoint import Checkpoint, CheckpointWriter, Snapshot, json_only, snapshot_slices
from stretto.comm.group import SHARED_MEMORY, Group
from stretto.data import (
    BatchHandle,
    Sampler,
    derive_seed,
    resumed_position,
    seed_everything,
)
from stretto.elastic.ledger import LedgerWriter, Start, record_start
from stretto.errors import PeerLost, ProbeFailed, TaskError, UserError, nearest
from stretto.evaluation import evaluate
from stretto.forecast import Forecast
from stretto.kept import kept_of, restore
from stretto.launch.context import WorkerContext
from stretto.observe import EventLog, allocator, give_back, peak_rss_bytes
from stretto.prepared import Prepared, Progress, RunOptions
from stretto.runfolder import write_summary
from stretto.skips import SkipWatch
from stretto.state import Slice
from stretto.step import StepObserver, StepOutcome, Stepper
from stretto.timeline import tell_time
from stretto.watch import Phase
from stretto.weights import weight_names


class Run:
    """One start of a run on one worker; :func:`stretto.start` makes it.

    ``state`` is the loop's own: any JSON it wants to find again after a resume. It must be the same on every worker.
    """

    def __init__(
        self,
        prepared: Prepared,
        options: RunOptions,
        context: WorkerContext,
        group: Group,
        observer: StepObserver | None = None,
    ) -> None:
        """Every worker must call it. Raises CheckpointError where the checkpoint doesn't fit the task."""
        self.task, self.plan, self.folder = prepared.task, prepared.plan, options.folder
        self.recipe = prepared.task.recipe
        self.state: dict[str, Any] = {}
        self._options, self._context, self._group = options, context, group
        self._began = time.perf_counter()
        self._data = open_data(self.task, self.plan, group)
        self._weight_names = weight_names(prepared.template.structure)
        self._best = BestSoFar(self.recipe, self.folder, self._data)
        source = fitting(prepared.template, prepared.checkpoint)
        self._law = prepared.law
        self._on = assemble(self.task, self.plan, prepared.template, group, source, forced=not self._law.kept)
        self._progress, self._skips, self._forecast = Progress(), SkipWatch(), Forecast(options.forecast)
        self._notes: list[str | None] = []
        train, position = self._data["train"], context.position
        self._stepper = Stepper(self.task, self.plan, train, self._on, observer, self._wants_stop, position)
        seed_everything(derive_seed(self.recipe.seed, "loop"))  # what the loop itself draws is the same everywhere
        if prepared.checkpoint is not None:
            self._resume(prepared.checkpoint)
        if group.transport.startswith("gloo ("):
            self._notes.append(f"the workers talk over {group.transport}, which is slower than shared memory")
        self._notes += [*self._on.notes, *retyped_notes(prepared.template, self.recipe.precision)]
        self._peak_bytes = self._peak_now()  # before the template goes: what was shared then is known only now
        prepared.template.release()
        self._saved = self._progress.step
        self._evaluated: tuple[int, dict[str, float]] | None = None
        self._baselines: dict[str, float] | None = None
        self._stopping = self._finished = self._told_draws = False
        self._open_files()
        atexit.register(self._leave)

    def _open_files(self) -> None:
        member, speaks = self._context.member, self._group.rank == 0
        self._say: Callable[[dict[str, Any]], None] = self._context.control.send if speaks else lambda event: None
        if speaks:
            samples, members = len(self._data["train"]), self._context.epoch.members
            start = Start(self._options.attempt, members, self._progress.step, samples, str(self.plan))
            record_start(self.folder, start)
        self._events = EventLog(self.folder, member)
        self._ledger = LedgerWriter(self.folder, member, self._options.attempt)
        self._writer = CheckpointWriter(self.folder / "checkpoints", self.recipe.keep, on_commit=self._committed)
        self._events.write("start", attempt=self._options.attempt, rank=self._group.rank, plan=str(self.plan))
        self._say(
            {
                "kind": "start",
                "first_step": self._progress.step + 1,
                "steps": self.recipe.steps,
                "unit": self.recipe.unit,
                "world_size": self._group.size,
            }
        )
        for text in filter(None, (*self._notes, *self.recipe.without_effect(self._data))):
            self._say({"kind": "note", "text": text})

    def _leave(self) -> None:
        """At the end of the process: a save in progress is waited for, and a loop that forgot to finish is told."""
        if self._finished:
            return
        with contextlib.suppress(UserError):
            self._writer.wait()
        kept = f"the checkpoint of step {self._saved}" if self._saved else "no checkpoint"
        text = f"the loop left at step {self._progress.step} without run.finish(): {kept} and no summary is kept"
        self._say({"kind": "note", "text": text})

    def _wants_stop(self) -> bool:
        return self._context.control.stop_requested()

    def batches(self) -> Iterator[BatchHandle]:
        """The global batches that are left, as handles (sample ids, no tensors); ends early where a stop is asked for.

        Raises:
            UserError: the loop asked for the next batch without having stepped the last one.
        """
        train = self._data["train"]
        endless = Sampler(len(train), self.recipe.batch, self.recipe.seed).batches(
            self._progress.step + 1, self._progress.position
        )
        if self._best.due(self._progress.step):  # the loop evaluated before its first batch
            self.save()
        left, ahead = tee(takewhile(lambda batch: batch.step <= self._last_step(), endless))
        train.expect((piece.ids, batch.start.epoch) for batch in ahead for piece in self._stepper.pieces(batch))
        del ahead  # nor would tee ever let go of a batch
        for batch in left:
            if self._stopping:
                return
            yield batch
            if self._progress.step != batch.step:
                raise UserError(
                    f"run.batches(): batch {batch.step} was not stepped; call run.step(batch) once for each"
                )
            regular = self.recipe.save_every and batch.step % self.recipe.save_every == 0
            if regular or self._best.due(batch.step):
                self.save()

    def _last_step(self) -> int:
        return min(self.recipe.steps, self._options.stop_after or self.recipe.steps)

    def step(self, batch: BatchHandle) -> StepOutcome:
        """Commits one global batch on all workers; ``outcome.loss`` is the global mean.

        Raises:
            UserError: ``batch`` is not the next one, or the gradient has not been finite for 50 steps in a row.
            PeerLost: another worker is gone.
        """
        if batch.step != self._progress.step + 1:
            raise UserError(
                f"run.step(): expected batch {self._progress.step + 1}, got {batch.step}; step each batch once"
            )
        try:
            outcome = self._stepper.step(batch)
        except PeerLost:
            self._writer.cancel()  # it may be waiting for the one that is gone
            raise
        self._note_draws()
        self._progress.step, self._progress.position = batch.step, batch.end
        self._progress.samples += outcome.samples
        self._progress.loss = outcome.loss
        self._progress.skipped += outcome.skipped is not None
        self._stopping = outcome.stopping
        self._record(batch, outcome)
        self._skips.see(outcome)
        for text in self._forecast.see(outcome.seconds):
            self._say({"kind": "note", "text": text})
        if outcome.stopping:
            self._say({"kind": "stopping", "step": outcome.step})
        return outcome

    def _note_draws(self) -> None:
        """Says once, after the first step, that random numbers in forward belong to the cut."""
        pieces = self.plan.dp * self.plan.microbatches
        if self._stepper.draws and not self._told_draws and pieces > 1:
            text = (
                f"forward draws random numbers (dropout, say); they belong to the {pieces} pieces that {self.plan} "
                f"cuts a batch into: one device gives these numbers with --plan dp=1,microbatches={pieces}, and "
                "another cut draws others"
            )
            self._say({"kind": "note", "text": text})
        self._told_draws = True

    def _record(self, batch: BatchHandle, outcome: StepOutcome) -> None:
        pieces = self._stepper.pieces(batch) if self._on.applied.ranks.counts else ()
        own = [index for piece in pieces if not piece.ghost for index in piece.ids]
        self._ledger.commit(batch.step, batch.start.epoch, batch.start.offset, batch.end.offset, own)
        event = {
            "step": outcome.step,
            "loss": outcome.loss,
            "weight": outcome.weight,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            "skipped": outcome.skipped,
            **({"terms": dict(outcome.terms)} if outcome.terms else {}),
        }
        self._events.write("step", **event, grad_norm=outcome.grad_norm, learning_rate=outcome.learning_rate)
        self._say(
            {
                "kind": "step",
                **event,
                "metrics": {**outcome.terms, **self._shown({"loss": (outcome.loss * outcome.weight, outcome.weight)})},
            }
        )

    def _shown(self, totals: dict[str, tuple[float, float]]) -> dict[str, float]:
        """What the task makes of the training loss alone; nothing where it needs more than that."""
        try:
            found = self.task.summarize(totals)
        except ZeroDivisionError:
            return {}
        except TaskError as error:
            if isinstance(error.__cause__, KeyError):  # it asked for a metric, which only an evaluation has
                return {}
            raise
        return {name: value for name, value in found.items() if name != "loss"}

    def log(self, **values: Any) -> None:
        """Writes ``values`` (plain JSON) into this worker's events."""
        self._events.write("log", step=self._progress.step, **values)

    @property
    def evaluation_due(self) -> bool:
        """Whether the recipe asks for an evaluation after the step just committed."""
        every, step = self.recipe.eval_every, self._progress.step
        return "val" in self._data and bool(every) and step % every == 0

    def evaluate(self, split: str = "val") -> dict[str, float]:
        """Loss and metrics over a whole split, exact on every plan. Every worker must call it, and gets the same.

        Raises:
            UserError: the task's data has no such split, or the recipe's ``best`` is not among what it gives.
        """
        if split not in self._data:
            raise UserError(f"run.evaluate(): no split {split!r} in data(); there are {', '.join(self._data)}"
                            f"{nearest(split, self._data)}")  # fmt: skip
        self._context.position.at(Phase.EVALUATE, self._progress.step)
        give_back()  # other sizes don't fit into what steps have left free, and would come on top of it
        totals = evaluate(self.task, self.plan, self._on, self._data[split], self._context.position.moved)
        # One rank's numbers for all: what a loop decides by them (to stop, say) is then decided alike everywhere.
        shown = self.task.summarize(totals) if self._group.rank == 0 else None
        found: dict[str, float] = self._group.broadcast_json(shown)
        self._events.write("evaluation", step=self._progress.step, split=split, **found)
        if split == "val":
            self._evaluated = (self._progress.step, found)
            if self._baselines is None:
                self._baselines = self._find_baselines() if self._group.rank == 0 else {}
            beside = {"metrics": found, "baselines": self._baselines}
            self._say({"kind": "evaluation", "step": self._progress.step, **beside})
            self._look(found)
        return found

    def _find_baselines(self) -> dict[str, float]:
        """The task's, in a process of their own: the memory that they take isn't what training needs."""
        try:
            return aside_on(self._group.device, self.task.baselines)
        except ProbeFailed as error:
            self._say({"kind": "note", "text": f"baselines() gave nothing to stand beside the metrics: {error}"})
            return {}

    def _look(self, found: dict[str, float]) -> None:
        try:
            self._best.look(self._progress.step, found)
        except UserError:  # on every worker: what was trained is not lost with a misspelt name
            self.save()
            self._writer.wait()
            raise

    def save(self) -> None:
        """Starts a checkpoint of the last committed step; training waits only for the copy to memory.

        Every worker must call it. Raises CheckpointError where the *previous* save failed (a full disk).
        """
        self._save(snapshot_slices)

    def _save(self, keep: Callable[[list[Slice]], tuple[Slice, ...]]) -> None:
        """Hands to the writer what ``keep`` makes of this worker's state."""
        progress, group = self._progress, self._group
        self._ledger.sync()  # a checkpoint is never ahead of the ledger
        if self._saved == progress.step:  # a member that was done first would write where the last save is tidied up
            self._writer.wait()
            group.barrier()
        parts = [*self._on.applied.export_state(), *self._on.optimizer.export_state()]
        self._writer.save(
            Snapshot(
                step=progress.step,
                token=f"{self._options.attempt}-{progress.step}",
                member=self._context.member,
                members=self._context.epoch.members,
                committer=group.rank == 0,
                slices=keep(parts),
                meta=self._meta(),
                pinned=self._best.pin(),
            )
        )
        self._saved = progress.step

    def _meta(self) -> dict[str, Any]:
        progress = self._progress
        return {
            "position": {"epoch": progress.position.epoch, "offset": progress.position.offset},
            "samples": progress.samples,
            "loss": progress.loss if progress.loss == progress.loss else None,
            "skipped": progress.skipped,
            **kept_of(self._on, self._stepper),
            "state": json_only(self.state, "run.state"),
            "plan": str(self.plan),
            "lengths": {split: len(feeder) for split, feeder in self._data.items()},
            "weights": self._weight_names,
            "best": self._best.to_json(),
        }

    def _resume(self, checkpoint: Checkpoint) -> None:
        meta = checkpoint.meta
        restore(checkpoint, self._on, self._stepper)
        self.state = meta["state"]
        position, note = resumed_position(checkpoint.step, meta, len(self._data["train"]))
        self._notes.append(note)
        self._best.resume(meta.get("best"), writes=self._group.rank == 0)
        self._progress = Progress(checkpoint.step, position, meta["samples"], meta["loss"], meta["skipped"])

    def _committed(self, step: int, path: Path) -> None:
        self._best.committed(step)
        self._context.control.send({"kind": "checkpoint", "step": step, "path": str(path)})

    def finish(self) -> dict[str, Any]:
        """Evaluates and saves what is not yet, writes ``summary.json`` and closes. Every worker must call it.

        Returns:
            The summary, the same on every worker but for its wall time.

        Raises:
            UserError: the run is at its end, and no step of this start had a finite gradient.
        """
        ended = self._progress.step >= self.recipe.steps
        if ended:
            self._skips.at_end()
        if ended and "val" in self._data and (self._evaluated is None or self._evaluated[0] != self._progress.step):
            self.evaluate()
        if self._saved != self._progress.step or self._best.due(self._progress.step):
            self._save(tuple)  # nothing is trained any more, so no copy is needed
        self._writer.wait()
        peak = int(self._group.maximum(float(max(self._peak_bytes, self._peak_now()))))
        summary = {
            "final_loss": self._progress.loss,
            "steps": self._progress.step,
            "samples": self._progress.samples,
            "wall_seconds": time.perf_counter() - self._began,
            "plan": str(self.plan),
            "world_size": self._group.size,
            "peak_bytes": peak,
            "allocator": allocator(),
            "skipped_steps": self._progress.skipped,
            "finished": ended,
            "evaluation": self._evaluated[1] if self._evaluated else None,
            "best": self._best.to_json(),
            "run": str(self.folder),
            "law_kept": self._law.kept,
        }
        if not self._law.kept:
            summary["law_broken"] = self._law.reason
        summary |= self._forecast.summary(peak)
        summary |= tell_time(self.folder, self._stepper.lanes, self._group, self._on.applied.schedule, str(self.plan))
        if self._group.rank == 0:
            write_summary(self.folder, summary)
        self._say({"kind": "summary", **summary})
        self._events.write("finish", steps=self._progress.step)
        self._close()
        return summary

    def _peak_now(self) -> int:
        sharers = self._group.size if self._group.transport == SHARED_MEMORY else 1
        return peak_rss_bytes(sharers) - self._context.imports_rss_bytes

    def _close(self) -> None:
        self._finished = True
        atexit.unregister(self._leave)
        self._events.close()
        self._ledger.close()
        self._data["train"].close()
        self._group.barrier()
        disassemble(self._on)
