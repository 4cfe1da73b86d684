"""One step: microbatches, then prepare, vote, apply.

*Prepare* reduces the gradients. The *vote* is one small all-reduce that carries all a decision needs: who agrees, the
sum of the losses and of their weights, the squared gradient norm, and which parameters took part. *Apply* is local and
deterministic, with no collective inside. So either every rank applies a step or none does, and what a discarded step
touched (buffers, generators, gradients) is put back: it leaves no trace.

The gradient of a global batch is sum(losses) / sum(weights) over all its samples. The sum of the weights W is known
only after the last forward, so backward runs on ``sum / N0``, with N0 a power of two near W (division by it is exact),
and the reduced gradient is multiplied by ``N0 / W``. A loss of several terms says its weights beforehand; then each
term is divided by its own before backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stretto.data import (
    BatchHandle,
    Feeder,
    Generators,
    Piece,
    cut,
    derive_seed,
    drawn_since,
    to_device,
)
from stretto.errors import Refused
from stretto.machinery import Machinery, call_of, forward
from stretto.mistakes import second_forward, whole_parameters_only
from stretto.observe import Lanes
from stretto.parallel import Call, Roots
from stretto.plan import Plan
from stretto.precision import computing, first_scale
from stretto.sync import Sync
from stretto.task import Task
from stretto.terms import Terms
from stretto.watch import Phase, Position

MAX_ATTEMPTS = 3
NOT_FINITE = "the gradient is not finite"


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one committed step did; the same on every rank.

    Args:
        step: counted from 1.
        loss: sum of the losses over sum of the weights of the global batch, before the update; of several terms, each
            divided by its own weight, the sum.
        weight: sum of the weights (of the first term).
        grad_norm: norm of the gradient of that loss, before clipping.
        samples: samples in the global batch.
        learning_rate: of the first group, as used.
        seconds: on this rank, from the call to the commit.
        skipped: why the optimizer was not called (no weight, or a gradient that isn't finite), or None.
        terms: the mean of each term of the loss, where it has several.
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
    terms: Mapping[str, float] = field(default_factory=dict)
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


@dataclass(frozen=True)
class _Decision:
    """The outcome of a vote; the same on every rank. ``sums``: of each term of the loss, losses and weights."""

    agreed: bool
    stopping: bool
    sums: Mapping[str, tuple[float, float]]
    square_sum: float
    not_finite: str
    reached: tuple[bool, ...]

    @property
    def weight(self) -> float:
        """Of the first term."""
        return next(iter(self.sums.values()))[1]

    @property
    def has_weight(self) -> bool:
        """Whether any term has."""
        return any(weight for _, weight in self.sums.values())

    @property
    def means(self) -> dict[str, float]:
        """Each term divided by its own weight."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self.sums.items()}

    @property
    def loss(self) -> float:
        """The terms' means, added up; a term without weight says nothing."""
        return sum(total / weight for total, weight in self.sums.values() if weight) if self.has_weight else math.nan


class _Microbatch:
    """One microbatch of one step; see `parallel.Microbatch`."""

    def __init__(
        self, stepper: Stepper, batch: BatchHandle, index: int, piece: Piece, terms: Terms, scale: float
    ) -> None:
        self._of, self._batch, self._index, self._piece = stepper, batch, index, piece
        self._terms, self._scale = terms, scale
        self.ghost = piece.ghost
        self.samples: Any = None
        self._call: Call | None = None

    def call(self) -> Call:
        """See :class:`~stretto.parallel.Microbatch`."""
        if self._call is None:
            of, piece = self._of, self._piece
            of.position.at(Phase.MICROBATCH, self._batch.step, self._index + 1, piece.ids)
            self.samples = of.fetch(piece, self._batch) if self.samples is None else self.samples
            self._call = call_of(of.task, of.on, self.samples)
        return self._call

    def forward(self, run: Callable[..., Any]) -> Any:
        """See :class:`~stretto.parallel.Microbatch`."""
        of = self._of
        of.position.at(Phase.MICROBATCH, self._batch.step, self._index + 1, self._piece.ids)
        seed = derive_seed(of.task.recipe.seed, "forward", self._batch.step, self._piece.first)
        output = forward(of.task, of.on, run, self.call(), seed)
        if of.draws is None:
            of.draws = drawn_since(seed, of.on.group.device)
        return output

    def loss(self, output: Any) -> Roots:
        """See :class:`~stretto.parallel.Microbatch`."""
        of = self._of
        with whole_parameters_only():  # a shard that forward read may show in the loss only
            with computing(of.task.recipe.precision, of.on.group.device.type):
                pairs = of.task.losses(output, self.samples)
            return self.roots(pairs)

    def roots(self, terms: Any) -> Roots:
        """See :class:`~stretto.parallel.Microbatch`."""
        return self._terms.add(terms, self.samples, self.ghost, self._scale)

    def backward(self, roots: Roots) -> None:
        """See :class:`~stretto.parallel.Microbatch`."""
        with whole_parameters_only(), second_forward(self._of.plan.recompute):
            torch.autograd.backward(*roots)
        self._call = self.samples = None

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        """See :class:`~stretto.parallel.Microbatch`."""
        return self._of.lanes.span(what, stage, self._index)


class Stepper:
    """Turns global batches into committed steps. Every rank must make the same calls in the same order."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        feeder: Feeder,
        machinery: Machinery,
        observer: StepObserver | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
        position: Position | None = None,
    ) -> None:
        self.task, self.plan, self._feeder = task, plan, feeder
        self.on = machinery
        self._observer = observer or Onlooker()
        self._wants_stop = wants_stop
        self.position = position or Position()
        self.lanes = Lanes()
        self.nominal_weight = float(task.recipe.batch)
        self.scale = first_scale(task.recipe.precision)
        self._names: tuple[str, ...] | None = None  # of the loss's terms, once known
        self.draws: bool | None = None  # whether forward draws random numbers; known after the first microbatch

    def step(self, batch: BatchHandle) -> StepOutcome:
        """Commits ``batch``; a step that is voted down is run again, up to three times.

        Raises:
            PeerLost: a member is gone.
            RuntimeError: some rank voted every attempt down.
        """
        began = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            buffers = {name: buffer.clone() for name, buffer in self.on.applied.module.named_buffers()}
            generators = Generators.remember()
            decision = self._prepare_and_vote(batch)
            generators.restore()
            if decision.agreed:
                with self.lanes.span("update"):
                    outcome = self._apply(batch, decision, began)
                self.lanes.step_done(batch.step)
                self.position.at(Phase.AFTER, batch.step)
                return outcome
            with torch.no_grad():
                for name, buffer in self.on.applied.module.named_buffers():
                    buffer.copy_(buffers[name])
            self.on.sync.begin()
            self.lanes.dropped()
        raise RuntimeError(f"step {batch.step} was voted down {MAX_ATTEMPTS} times; its samples stay uncommitted")

    def _prepare_and_vote(self, batch: BatchHandle) -> _Decision:
        on = self.on
        on.applied.refresh()
        on.sync.begin()
        on.applied.module.train()
        pieces = self.pieces(batch)
        terms = Terms(self.task, on.data, self._nominal(), self._names)
        self.position.at(Phase.MICROBATCH, batch.step)
        fetched = [self.fetch(piece, batch) for piece in pieces] if terms.weighs_first else None
        terms.weigh(pieces, fetched)
        self._names = terms.names
        scale = 1.0 if self.scale is None else self.scale.scale
        parts = [_Microbatch(self, batch, index, piece, terms, scale) for index, piece in enumerate(pieces)]
        for part, samples in zip(parts, fetched or (), strict=False):
            part.samples = samples
        on.applied.train(parts, on.sync.microbatch)
        self.position.at(Phase.REDUCE, batch.step)
        with self.lanes.span("reduce"):
            on.sync.finish()
        self.position.at(Phase.VOTE, batch.step)
        with self.lanes.span("vote"):
            return self._vote(batch.step, terms)

    def pieces(self, batch: BatchHandle) -> tuple[Piece, ...]:
        """Of a batch those that this rank computes, one a microbatch."""
        return cut(batch.ids, self.plan.dp, self.plan.microbatches, self.on.data.rank)

    def fetch(self, piece: Piece, batch: BatchHandle) -> Any:
        """The samples of a piece, on the device."""
        return to_device(self._feeder.get(piece.ids, batch.start.epoch), self.on.group.device)

    def _nominal(self) -> float:
        """N0: the power of two next to the last committed step's weight."""
        return float(2.0 ** round(math.log2(self.nominal_weight)))

    def _vote(self, step: int, terms: Terms) -> _Decision:
        sync, group = self.on.sync, self.on.group
        agrees = self._observer.vote(step) and sync.agrees()
        mark, bad = float(sync.mark()), float(not terms.finite)
        head = [float(agrees), float(self._wants_stop()), mark, mark * mark, bad, bad * group.rank]
        head.append(float(sync.square_sum()))
        own = terms.sums.reshape(-1) * float(self.on.applied.ranks.counts)
        ballot = torch.cat([torch.tensor(head, dtype=torch.float64), own, sync.reached()])
        group.all_reduce(ballot)
        votes, stops, marks, squares, bads, bad_ranks, square_sum = ballot[: len(head)].tolist()
        if group.size * squares != marks * marks:  # whole numbers, exact: equal just where all marks are
            raise Refused(
                f"plan {self.plan}: step {step}: the ranks ran the model's layers in different orders, as the model "
                "chooses layers by its data; sharded layers are gathered by all ranks together, so the numbers would "
                "be wrong. Use zero=0"
            )
        sums = terms.read(ballot[len(head) : len(head) + terms.sums.numel()], step)
        not_finite = "" if not bads else f"rank {bad_ranks:.0f}" if bads == 1 else f"{bads:.0f} ranks"
        hits = tuple(flag > 0 for flag in ballot[len(head) + terms.sums.numel() :].tolist())
        return _Decision(votes == group.size, stops > 0, sums, square_sum, not_finite, hits)

    def _apply(self, batch: BatchHandle, decision: _Decision, began: float) -> StepOutcome:
        optimizer, schedule, sync = self.on.optimizer, self.on.schedule, self.on.sync
        factor = self._factor(decision)
        norm = math.sqrt(decision.square_sum) * factor if decision.square_sum >= 0 else math.nan
        skipped = self._why_skip(decision, norm)
        self._observer.reduced(batch.step, sync, factor)
        learning_rate = float(optimizer.optimizer.param_groups[0]["lr"]) if optimizer.optimizer.param_groups else 0.0
        if skipped is None:
            clip = self.task.recipe.clip
            # torch.nn.utils.clip_grad_norm_'s rule, so that a hand-written loop gives the same numbers.
            sync.scale(factor * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))))
            gradients = sync.gradients()
            used = {name: g for (name, g), hit in zip(gradients.items(), decision.reached, strict=True) if hit}
            optimizer.step({name: used.get(name) for name in gradients})
            self.on.applied.updated()
            self.nominal_weight = decision.weight or self.nominal_weight
        if self.scale is not None and decision.has_weight:
            self.scale = self.scale.after(math.isfinite(norm))
        self.on.applied.clear_gradients()
        if schedule is not None:
            schedule.step()
        outcome = StepOutcome(
            step=batch.step,
            loss=decision.loss,
            weight=decision.weight,
            grad_norm=norm,
            samples=len(batch.ids),
            learning_rate=learning_rate,
            seconds=time.perf_counter() - began,
            skipped=skipped,
            terms={} if len(decision.sums) == 1 else decision.means,
            stopping=decision.stopping,
        )
        self._observer.applied(outcome)
        return outcome

    def _factor(self, decision: _Decision) -> float:
        """What makes the reduced gradient that of the mean loss. Several terms were divided before backward."""
        if not decision.has_weight:
            return 0.0
        scale = 1.0 if self.scale is None else self.scale.scale
        return (1.0 if self.task.has("weights") else self._nominal() / decision.weight) / scale

    def _why_skip(self, decision: _Decision, norm: float) -> str | None:
        if not decision.has_weight:
            return "the batch has no weight"
        if math.isfinite(norm):
            return None
        if decision.not_finite:
            return f"{NOT_FINITE}: neither is the loss on {decision.not_finite}"
        if self.scale is not None:
            return f"{NOT_FINITE} at the loss scale {self.scale.scale:g}; the next step's is half"
        return NOT_FINITE
