"""Looks on in every worker of a plan, and compares what lies there with one device's: nothing is gathered.

So every copy of every tensor on every rank is compared, and the comparison sends nothing that could hide a missing
message. Each rank reads only its own boxes of one device's files.

One thing the witness does change. A gradient that is zero but for rounding (of a bias before BatchNorm, or of the bias
of attention keys) is other noise here than on one device, and Adam makes a full step of it. Those weights are left out
of the comparison; but BatchNorm's running mean follows such a bias, so that the noise would spread to what is compared.
Therefore such elements of the gradient, once compared, are given one device's noise before the optimizer sees them: a
change of less than a billionth of the largest gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from stretto.machinery import Machinery
from stretto.state import Box
from stretto.step import StepOutcome
from stretto.sync import Sync
from stretto.verify import compare
from stretto.verify.facts import Kind, RankFacts, StepFacts, TensorFact
from stretto.verify.feed import Feed
from stretto.verify.recorded import Recorded
from stretto.verify.reference import OPTIMIZER, measure_of
from stretto.verify.tolerances import limits_of

MODEL: Final = "model/"


@dataclass(frozen=True)
class _Held:
    """This rank's part of one tensor, ``data`` None where the plan has none; ``name`` as in one device's files."""

    kind: Kind
    name: str
    box: Box
    data: torch.Tensor | None

    @property
    def parameter(self) -> str:
        """The parameter or buffer that it belongs to."""
        if self.kind == "state":
            return self.name.removeprefix(OPTIMIZER).rpartition("/")[0]
        return self.name.partition("/")[2]


class Witness:
    """A :class:`~stretto.step.StepObserver` for one rank; it always agrees.

    Args:
        feed: tells which samples this rank was fed.
    """

    def __init__(self, recorded: Recorded, machinery: Machinery, feed: Feed) -> None:
        self._recorded, self._on, self._feed = recorded, machinery, feed
        self._left_out: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._gradients: tuple[TensorFact, ...] = ()
        self._steps: list[StepFacts] = []
        self._parted = False

    def begin(self) -> None:
        """Compares the initial weights."""
        facts = tuple(self._look(0, held) for held in self._weights())
        self._remember(StepFacts(step=0, weights=_largest(facts), tensors=facts))

    def vote(self, step: int) -> bool:
        """Agrees."""
        return True

    def reduced(self, step: int, sync: Sync, factor: float) -> None:
        """Compares the gradients of the mean loss, and finds the elements that rounding alone moves."""
        reference = self._recorded.record.steps[step - 1]
        facts = []
        if reference.weight and math.isfinite(reference.norm):
            for name, gradient in sync.gradients().items():
                facts += self._look_at_gradient(step, name, gradient, factor)
        self._gradients = tuple(facts)
        held = [item for item in (*self._weights(), *self._state(step)) if item.kind != "buffer"]
        self._before = {item.name: item.data.clone() for item in held if item.data is not None}

    def applied(self, outcome: StepOutcome) -> None:
        """Compares loss, norm, weights and state, now that the step is applied."""
        step = outcome.step
        reference = self._recorded.record.steps[step - 1]
        weights = tuple(self._look(step, held) for held in self._weights())
        state = tuple(self._look(step, held) for held in self._state(step))
        ids, ghosts = self._feed.take()
        self._remember(
            StepFacts(
                step=step,
                ids=ids,
                ghosts=ghosts,
                weight=outcome.weight,
                loss=compare.relative_numbers(outcome.loss, reference.loss),
                loss_ratio=compare.ratio_of_numbers(outcome.loss, reference.loss),
                norm=compare.relative_numbers(outcome.grad_norm, reference.norm),
                norm_ratio=compare.ratio_of_numbers(outcome.grad_norm, reference.norm),
                gradient=_largest(self._gradients),
                weights=_largest(weights),
                state=_largest(state),
                tensors=(*self._gradients, *weights, *state),
            )
        )

    def facts(self) -> RankFacts:
        """All that was seen."""
        places = self._on.applied.places
        counts = {name: int(mask.sum()) for name, mask in self._left_out.items() if places[name].owner}
        return RankFacts(rank=self._on.group.rank, share=self._on.data.rank, steps=tuple(self._steps), left_out=counts)

    def _remember(self, facts: StepFacts) -> None:
        """Keeps the single tensors only of the step in which this rank and one device part."""
        limits = limits_of(self._recorded.record, facts.step)
        parts = facts.loss > limits.loss or facts.norm > limits.norm or any(fact.differs for fact in facts.tensors)
        if self._parted or not parts:
            facts = StepFacts(**{**facts.__dict__, "tensors": ()})
        self._parted |= parts
        self._steps.append(facts)
        self._before = {}

    # ---- what lies here

    def _weights(self) -> Iterator[_Held]:
        places = self._on.applied.places
        for piece in self._on.applied.export_state():
            kind: Kind = "weight" if piece.spec.name.removeprefix(MODEL) in places else "buffer"
            yield _Held(kind, piece.spec.name, piece.box, piece.data)

    def _state(self, step: int) -> Iterator[_Held]:
        """What the optimizer keeps here, and what it should keep here by one device's account."""
        optimizer, places = self._on.optimizer, self._on.applied.places
        kept = {(piece.spec.name, piece.box): piece.data for piece in optimizer.export_state()}
        for name, values in optimizer.scalars().items():
            for key, value in values.items():
                if isinstance(value, bool | int | float):
                    number = torch.tensor(float(value), dtype=torch.float64)
                    kept[f"{OPTIMIZER}{name}/{key}", Box.whole(())] = number
        for (full, box), data in kept.items():
            yield _Held("state", full, box, data)
        known = {full for full, _ in kept}
        for full in sorted(self._recorded.names(step)):
            if full.startswith(OPTIMIZER) and full not in known:
                place = places[full.removeprefix(OPTIMIZER).rpartition("/")[0]]
                shape = self._recorded.shape(step, full)
                if place.box.numel:  # a rank without elements of a parameter need not count its steps
                    whole = shape != place.spec.shape
                    for box in [Box.whole(shape)] if whole else [box for box, _ in place.pieces]:
                        yield _Held("state", full, box, None)

    # ---- one part of one tensor

    def _look_at_gradient(self, step: int, name: str, gradient: torch.Tensor | None, factor: float) -> list[TensorFact]:
        place, limits = self._on.applied.places[name], limits_of(self._recorded.record, step)
        ours = torch.zeros_like(place.local) if gradient is None else gradient.to_dense() * factor
        full = f"gradient/{name}"
        facts = [self._look(step, _Held("gradient", full, box, ours[where])) for box, where in place.pieces]
        if gradient is not None and full in self._recorded.names(step):
            theirs = place.gather(partial(self._recorded.read, step, full))
            noise = compare.noise(ours, theirs, self._recorded.scale(step, "gradient"), limits.quiet)
            if bool(noise.any()):
                self._left_out[name] = self._left_out.get(name, torch.zeros_like(noise)) | noise
                if factor and not any(fact.differs for fact in facts) and not gradient.is_sparse:
                    gradient[noise] = (theirs / factor)[noise]
        return facts

    def _look(self, step: int, held: _Held) -> TensorFact:
        """The fact of one part. A tensor that one side lacks is compared as zeros, and differs in any case."""
        recorded, limits = self._recorded, limits_of(self._recorded.record, step)
        known = held.name in recorded.names(step)
        theirs = recorded.read(step, held.name, held.box) if known else torch.zeros(held.box.shape)
        ours = torch.zeros_like(theirs) if held.data is None else held.data
        if ours.shape != theirs.shape:
            raise RuntimeError(f"{held.name}: {tuple(ours.shape)} here, {tuple(theirs.shape)} in one device's file")
        measure = measure_of(held.name, theirs if known else ours)
        scale = recorded.scale(step, measure)
        left_out = self._left_out.get(held.parameter) if held.kind in ("weight", "state") else None
        if left_out is not None and left_out.shape != ours.shape:
            left_out = None  # a counter beside the parameter
        missing = "plan" if held.data is None else "" if known else "one device"
        rel = compare.relative(compare.gap(ours, theirs, left_out), scale)
        if missing and held.kind == "state":
            rel = max(rel, 1.0)
        bound = {"gradient": limits.gradient, "state": limits.state}.get(held.kind, limits.weight)
        before = self._before.get(held.name)
        detailed = rel > bound and not self._parted
        ratio, residual = compare.best_fit(ours, theirs) if detailed else (None, None)
        return TensorFact(
            kind=held.kind,
            name=f"{held.parameter}/{held.name.rpartition('/')[2]}" if held.kind == "state" else held.parameter,
            rel=rel,
            share=compare.relative(compare.magnitude([theirs]), scale),
            box=str(held.box),
            whole=tuple(theirs.shape) == (recorded.shape(step, held.name) if known else tuple(ours.shape)),
            differs=rel > bound,
            ratio=ratio,
            residual=residual,
            digest=compare.digest(ours) if detailed else "",
            missing=missing,
            unchanged=before is not None and torch.equal(before, ours),
        )


def _largest(facts: tuple[TensorFact, ...]) -> float:
    return max((fact.rel for fact in facts), default=0.0)
