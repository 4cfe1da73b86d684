"""One step: microbatches, then prepare, vote, apply.

*Prepare* reduces the gradients. The *vote* is one small all-reduce that carries all a decision needs: who agrees, the
sum of the losses and of their weights, the squared gradient norm, and which parameters took part. *Apply* is local and
deterministic, with no collective inside. So either every rank applies a step or none does, and what a discarded step
touched (buffers, generators, gradients) is put back: it leaves no trace.

The gradient of a global batch is sum(losses) / sum(weights) over all its samples. The sum of the weights W is known
only after the last forward, so backward runs on ``sum / N0``, with N0 a power of two near W (division by it is exact),
and the reduced gradient is multiplied by ``N0 / W``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from stretto.data import (
    BatchHandle,
    Generators,
    Piece,
    cut,
    derive_seed,
    drawn_since,
)
from stretto.errors import Refused, TaskError
from stretto.machinery import Machinery, forward
from stretto.plan import Plan
from stretto.precision import computing
from stretto.sync import Sync
from stretto.task import Task

MAX_ATTEMPTS = 3
NOT_FINITE = "the gradient is not finite"


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one committed step did; the same on every rank.

    Args:
        step: counted from 1.
        loss: sum of the losses over sum of the weights of the global batch, before the update.
        weight: sum of the weights.
        grad_norm: norm of the gradient of that loss, before clipping.
        samples: samples in the global batch.
        learning_rate: of the first group, as used.
        seconds: on this rank, from the call to the commit.
        skipped: why the optimizer was not called (no weight, or a gradient that isn't finite), or None.
        stopping: some rank was asked to stop; all leave at this safe point.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    samples: int
    learning_rate: float
    seconds: float
    skipped: str | None
    stopping: bool = False


class StepObserver(Protocol):
    """Looks on, and may veto; verify and fault injection use it. Called on every rank, in this order."""

    def vote(self, step: int) -> bool:
        """This rank's vote on ``step``."""

    def reduced(self, step: int, sync: Sync, factor: float) -> None:
        """Gradients are reduced and not yet scaled: times ``factor`` they are the gradient of the mean loss."""

    def applied(self, outcome: StepOutcome) -> None:
        """The step is committed and applied."""


class Onlooker:
    """A :class:`StepObserver` that agrees to everything."""

    def vote(self, step: int) -> bool:
        """Agrees."""
        return True

    def reduced(self, step: int, sync: Sync, factor: float) -> None:
        """Does nothing."""

    def applied(self, outcome: StepOutcome) -> None:
        """Does nothing."""


@dataclass
class _Sums:
    """What forward adds up on one rank, in float64."""

    loss: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class _Decision:
    """The outcome of a vote; the same on every rank."""

    agreed: bool
    stopping: bool
    loss_sum: float
    weight: float
    square_sum: float
    reached: tuple[bool, ...]


class Stepper:
    """Turns global batches into committed steps. Every rank must make the same calls in the same order."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        dataset: Dataset[Any],
        machinery: Machinery,
        observer: StepObserver | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._task, self._plan, self._dataset = task, plan, dataset
        self._on = machinery
        self._observer = observer or Onlooker()
        self._wants_stop = wants_stop
        self.nominal_weight = float(task.recipe.batch)
        self.draws: bool | None = None  # whether forward draws random numbers; known after the first microbatch

    def step(self, batch: BatchHandle) -> StepOutcome:
        """Commits ``batch``; a step that is voted down is run again, up to three times.

        Raises:
            PeerLost: a member is gone.
            RuntimeError: some rank voted every attempt down.
        """
        began = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            buffers = {name: buffer.clone() for name, buffer in self._on.applied.module.named_buffers()}
            generators = Generators.remember()
            decision = self._prepare_and_vote(batch)
            generators.restore()
            if decision.agreed:
                return self._apply(batch, decision, began)
            with torch.no_grad():
                for name, buffer in self._on.applied.module.named_buffers():
                    buffer.copy_(buffers[name])
            self._on.sync.begin()
        raise RuntimeError(f"step {batch.step} was voted down {MAX_ATTEMPTS} times; its samples stay uncommitted")

    def _prepare_and_vote(self, batch: BatchHandle) -> _Decision:
        sums = _Sums(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        self._on.sync.begin()
        self._on.applied.module.train()
        pieces = cut(batch.ids, self._plan.dp, self._plan.microbatches, self._on.group.rank)
        for piece in pieces:
            with self._on.sync.microbatch(last=piece is pieces[-1], ghost=piece.ghost):
                self._run(piece, batch, sums)
        self._on.sync.finish()
        return self._vote(batch.step, sums)

    def _run(self, piece: Piece, batch: BatchHandle, sums: _Sums) -> None:
        """Forward and backward of one microbatch."""
        seed = derive_seed(self._task.recipe.seed, "forward", batch.step, piece.first)
        output, samples = forward(self._task, self._on, self._dataset, piece.ids, batch.start.epoch, seed)
        if self.draws is None:
            self.draws = drawn_since(seed, self._on.group.device)
        with computing(self._task.recipe.precision):
            total, weight = self._task.loss(output, samples)
        if not total.requires_grad:
            raise TaskError(
                "task: loss() returned a sum without a gradient; it must be computed from the model's output"
            )
        # A ghost's gradient is its sample's with a factor of exactly 0.
        weighting = torch.zeros_like(total) if piece.ghost else torch.full_like(total, 1.0 / self._nominal())
        torch.autograd.backward(total, weighting)
        if not piece.ghost:
            sums.loss += total.detach().double().cpu()
            sums.weight += weight.detach().double().cpu()

    def _nominal(self) -> float:
        """N0: the power of two next to the last committed step's weight."""
        return float(2.0 ** round(math.log2(self.nominal_weight)))

    def _vote(self, step: int, sums: _Sums) -> _Decision:
        sync, group = self._on.sync, self._on.group
        agrees = self._observer.vote(step) and sync.agrees()
        mark = float(sync.mark())
        head = [
            float(agrees),
            float(self._wants_stop()),
            mark,
            mark * mark,
            float(sums.loss),
            float(sums.weight),
            float(sync.square_sum()),
        ]
        ballot = torch.cat([torch.tensor(head, dtype=torch.float64), sync.reached()])
        group.all_reduce(ballot)
        votes, stops, marks, squares, loss, weight, square_sum, *reached = ballot.tolist()
        if group.size * squares != marks * marks:  # whole numbers, exact: equal just where all marks are
            raise Refused(
                f"plan {self._plan}: step {step}: the ranks ran the model's layers in different orders, as the model "
                "chooses layers by its data; sharded layers are gathered by all ranks together, so the numbers would "
                "be wrong. Use zero=0"
            )
        if weight < 0:
            raise TaskError(f"task: step {step}: loss() gave weights whose sum is {weight}; weights can't be negative")
        hits = tuple(flag > 0 for flag in reached)
        return _Decision(votes == group.size, stops > 0, loss, weight, square_sum, hits)

    def _apply(self, batch: BatchHandle, decision: _Decision, began: float) -> StepOutcome:
        optimizer, schedule, sync = self._on.optimizer, self._on.schedule, self._on.sync
        weight = decision.weight
        factor = self._nominal() / weight if weight else 0.0
        norm = math.sqrt(decision.square_sum) * factor if decision.square_sum >= 0 else math.nan
        skipped = _why_skip(weight, norm)
        self._observer.reduced(batch.step, sync, factor)
        learning_rate = float(optimizer.optimizer.param_groups[0]["lr"]) if optimizer.optimizer.param_groups else 0.0
        if skipped is None:
            clip = self._task.recipe.clip
            # torch.nn.utils.clip_grad_norm_'s rule, so that a hand-written loop gives the same numbers.
            sync.scale(factor * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))))
            gradients = sync.gradients()
            used = {name: g for (name, g), hit in zip(gradients.items(), decision.reached, strict=True) if hit}
            optimizer.step({name: used.get(name) for name in gradients})
            self.nominal_weight = weight
        self._on.applied.clear_gradients()
        if schedule is not None:
            schedule.step()
        outcome = StepOutcome(
            step=batch.step,
            loss=decision.loss_sum / weight if weight else math.nan,
            weight=weight,
            grad_norm=norm,
            samples=len(batch.ids),
            learning_rate=learning_rate,
            seconds=time.perf_counter() - began,
            skipped=skipped,
            stopping=decision.stopping,
        )
        self._observer.applied(outcome)
        return outcome


def _why_skip(weight: float, norm: float) -> str | None:
    if weight == 0:
        return "the batch has no weight"
    if not math.isfinite(norm):
        return NOT_FINITE
    return None
