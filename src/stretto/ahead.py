"""A rank that runs alone, and the batches to come: those that ask for more memory than the first ones are tried too.

Where samples differ in length, the longest of many batches takes the most; and of a model that is cut inside each set
of shapes has a trace, which is kept.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from stretto.data import BatchHandle, Piece, mapped
from stretto.observe import give_back
from stretto.step import Stepper
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
        samples, shapes = super().fetch(piece, batch), list[tuple[int, ...]]()

        def note(tensor: Any) -> Any:
            shapes.append(tuple(tensor.shape))
            return tensor

        mapped(samples, note)
        self.asked.setdefault(batch.step, set()).add(tuple(shapes))
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


def step_on_what_asks_more(stepper: Alone, batches: Sequence[BatchHandle], resident: Callable[[], int]) -> int:
    """Steps on those of ``batches`` that ask for more than the first ones, which it has stepped on, did.

    Returns:
        The bytes that the traces of the others' shapes will take, by what those of a few have taken.
    """
    asked, known = stepper.asked, set[Shapes]().union(*stepper.asked.values())
    if not stepper.varied:  # nor will the others be
        return 0
    largest_known, done, began = max(map(_elements, known)), len(asked), time.perf_counter()
    for batch in batches[done:]:
        for piece in stepper.pieces(batch):
            stepper.fetch(piece, batch)
        if time.perf_counter() - began > LOOKING:
            break
    coming = batches[done : len(asked)]
    largest = max(coming, key=lambda batch: max(map(_elements, asked[batch.step])), default=None)
    if largest is not None and max(map(_elements, asked[largest.step])) > largest_known:
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
        return 0
    give_back()
    left = len(set[Shapes]().union(*asked.values()) - known)
    return left * max(0, resident() - before) // max(1, traced)


def _elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))
