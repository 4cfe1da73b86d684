"""Which of the batches to come a rank alone steps on, and what it makes of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stretto.ahead import AHEAD, TRIED, Alone, shapes_to_evaluate, step_on_what_asks_more
from stretto.data import BatchHandle
from stretto.plan import Plan

FIRST = 7


class Lengths:
    """A stepper over sentences: of each batch, by its step, their length here. A trace takes a megabyte."""

    def __init__(self, plan: str, lengths: list[int]) -> None:
        self.plan, self._lengths = Plan.parse(plan), lengths
        self.asked = {step: {self._shapes(step)} for step in range(FIRST)}
        self.stepped: list[int] = []
        self.traces = {*lengths[:FIRST]}
        self.varied = len(self.traces) > 1

    def _shapes(self, step: int) -> tuple[tuple[int, ...], ...]:
        return ((2, self._lengths[step]), (2,))

    def pieces(self, batch: BatchHandle) -> tuple[int, ...]:
        return (batch.step,)

    def fetch(self, piece: int, batch: BatchHandle) -> None:
        assert batch.step not in self.asked, "once is enough"
        self.asked[batch.step] = {self._shapes(piece)}

    def step(self, batch: BatchHandle) -> None:
        self.stepped.append(batch.step)
        self.traces.add(self._lengths[batch.step])

    def more(self, steps: int = AHEAD) -> int:
        batches = [cast(BatchHandle, SimpleNamespace(step=step)) for step in range(steps)]
        found = step_on_what_asks_more(cast(Alone, self), batches, lambda: 10**6 * len(self.traces))
        return found.each_bytes * found.left


def test_where_all_are_alike_none_is_looked_at() -> None:
    one = Lengths("tp=2", [5] * AHEAD)
    assert one.more() == 0 and not one.stepped and len(one.asked) == FIRST


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_the_longest_is_stepped_on_first(plan: str) -> None:
    one = Lengths(plan, [3, 5, *[4] * 28, *[6] * 16, 30, *[6] * 17])
    assert one.more() == 0 and one.stepped == [46, 30]
    one = Lengths(plan, [3, 5, *[4] * 62])
    assert one.more() == 0 and not one.stepped, "it was among the first"
    one = Lengths(plan, [3, 5, *[4] * 28, *[6] * 16, 30, *[6] * 17])
    assert one.more(steps=20) == 0 and not one.stepped, "the run ends before"


def test_of_a_traced_graph_the_rest_is_what_a_few_take() -> None:
    first, new = [*range(3, 3 + FIRST)], [12, 11, 10, 13, 14, 16, 17, 18]
    lengths = [*first, 3, 4, *new, *new, 40, *[3] * (AHEAD - FIRST - 3 - 2 * len(new))]
    for plan in ("tp=2", "pp=2,microbatches=2", "branch=2"):
        one = Lengths(plan, lengths)
        assert one.more() == 10**6 * len(new[TRIED:]) > 0
        assert [lengths[step] for step in one.stepped] == [40, *new[:TRIED]]
    one = Lengths("dp=2", lengths)
    assert one.more() == 0 and len(one.stepped) == 1 + TRIED, "without a trace nothing is kept"
    one = Lengths("tp=2", [3, 15, *[4] * 20, 5, *[3] * 41])
    assert one.more() == 0 and one.stepped == [22], "with one trace of its own nothing is left"


def test_an_evaluation_has_shapes_of_its_own() -> None:
    """Eight batches of two sentences, each padded to the longer; of those between the ends four lengths are new."""
    lengths = [3, 5, 5, 4, 7, 1, 9, 2, 9, 1, 1, 3, 6, 6, 2, 8]
    asked = list[int]()

    class Sentences:
        def __len__(self) -> int:
            return len(lengths)

        def get(self, ids: tuple[int, ...], epoch: str) -> torch.Tensor:
            assert epoch == "evaluate"
            asked.extend(ids)
            return torch.zeros(len(ids), max(lengths[index] for index in ids))

    task = SimpleNamespace(recipe=SimpleNamespace(eval_batch=2, batch=16))
    on = SimpleNamespace(data=SimpleNamespace(rank=0))
    found = shapes_to_evaluate(cast(Any, task), Plan.parse("tp=2"), cast(Any, on), cast(Any, Sentences()))
    assert found == len({7, 9, 3, 6} - {5, 8}) and set(asked) == set(range(16))


def test_a_run_of_few_steps_asks_for_nothing_else() -> None:
    one = Lengths("tp=2", list(range(FIRST)))
    assert one.more(steps=FIRST) == 0 and not one.stepped
