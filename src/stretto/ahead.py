"""A rank that runs alone, and the batches to come: those that ask for more memory than the first ones are tried too.

Where samples differ in length, the longest of many batches takes the most; and of a model that is cut inside each set
of shapes has a trace, which is kept.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from stretto.data import BatchHandle, Feeder, Piece, tensors_in
from stretto.evaluation import EPOCH, pieces_to_evaluate
from stretto.machinery import Machinery
from stretto.observe import give_back
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task
from stretto.terms import Terms

AHEAD: Final = 64  # steps for whose batches there is to be room
LOOKING: Final = 2.0  # seconds for them
TRIED: Final = 6  # of them that are stepped on, if those seconds suffice

Shapes = tuple[tuple[int, ...], ...]


class Alone(Stepper):
    """A stepper whose votes all pass: what one rank alone adds up says nothing, and may be nothing.

    ``asked``: by the number of its step, of each batch that was fetched the shapes of this rank's pieces.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: dict[int, set[Shapes]] = {}

    def fetch(self, piece: Piece, batch: BatchHandle) -> Any:
        """See :class:`Stepper`."""
        samples = super().fetch(piece, batch)
        self.asked.setdefault(batch.step, set()).add(_shapes_of(samples))
        return samples

    @property
    def varied(self) -> bool:
        """Whether batches differ in their shapes, of those that were fetched."""
        return len(set(map(frozenset, self.asked.values()))) > 1

    def _vote(self, step: int, terms: Terms) -> Any:
        found = super()._vote(step, terms)
        sums = {name: (1.0, self.nominal_weight) for name in found.sums}
        reached = (True,) * len(found.reached)
        return dataclasses.replace(found, agreed=True, sums=sums, square_sum=1.0, not_finite="", reached=reached)


@dataclass(frozen=True)
class Traces:
    """Of shapes that come later.

    Args:
        each_bytes: that one takes, by those of a few; 0: none are kept.
        left: how many are not there yet.
    """

    each_bytes: int = 0
    left: int = 0


def step_on_what_asks_more(stepper: Alone, batches: Sequence[BatchHandle], resident: Callable[[], int]) -> Traces:
    """Steps on those of ``batches`` that ask for more than the first ones, which it has stepped on, did. Returns what
    the traces of the others' shapes will take."""
    if not stepper.varied:  # nor will the others be
        return Traces()
    asked, done, began = stepper.asked, len(stepper.asked), time.perf_counter()
    known = set[Shapes]().union(*asked.values())
    most = _elements(known)
    for batch in batches[done:]:
        for piece in stepper.pieces(batch):
            stepper.fetch(piece, batch)
        if time.perf_counter() - began > LOOKING:
            break
    coming = batches[done : len(asked)]
    largest = max(coming, key=lambda batch: _elements(asked[batch.step]), default=None)
    if largest is not None and _elements(asked[largest.step]) > most:
        stepper.step(largest)
        known |= asked[largest.step]
    if stepper.plan.traced:
        give_back()  # what stays is to be seen
    before, traced, tried, began = resident(), 0, 0, time.perf_counter()
    for batch in coming:
        if (new := asked[batch.step] - known) and tried < TRIED and time.perf_counter() - began < LOOKING:
            stepper.step(batch)
            known |= new
            traced, tried = traced + len(new), tried + 1
    if not stepper.plan.traced:
        return Traces()
    give_back()
    left = len(set[Shapes]().union(*asked.values()) - known)
    return Traces(max(0, resident() - before) // max(1, traced), left)


def shapes_to_evaluate(task: Task, plan: Plan, on: Machinery, feeder: Feeder) -> int:
    """How many sets of shapes this rank's first pieces of a split have that those of its ends don't."""
    found, began = set[Shapes](), time.perf_counter()
    for piece in islice(pieces_to_evaluate(task, plan, on, feeder), AHEAD):
        found.add(_shapes_of(feeder.get(piece.ids, EPOCH)))
        if time.perf_counter() - began > LOOKING:
            break
    ends = pieces_to_evaluate(task, plan, on, feeder, ends=True)
    return len(found - {_shapes_of(feeder.get(piece.ids, EPOCH)) for piece in ends})


def _shapes_of(samples: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(samples))


def _elements(pieces: Iterable[Shapes]) -> int:
    """Of the largest piece."""
    return max(sum(map(math.prod, shapes)) for shapes in pieces)
