"""What a rank of a pipeline holds between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from stretches import cut_at
from stretto.comm.line import Line
from stretto.comm.members import Broken
from stretto.graph.cut import Cut
from stretto.graph.reading import Reading
from stretto.graph.stages import work_of
from stretto.graph.trace import trace
from stretto.parallel import Call, Roots
from stretto.parallel.deferred import Deferred
from stretto.parallel.offload import LEAST_BYTES, Mover
from stretto.parallel.pipeline import Execution
from stretto.parallel.program import Portioned, Program
from stretto.schedule import Flow, Kind, build_schedule

WIDTH = 128
CPU = torch.device("cpu")


class Batch:
    """One microbatch of two."""

    ghost, samples = False, None

    def __init__(self, x: Tensor, at_backward: Callable[[], None]) -> None:
        self._x, self._at_backward = x, at_backward

    def call(self) -> Call:
        return (self._x,), {}

    def forward(self, run: Callable[..., Any]) -> Any:
        return run(self._x)

    def loss(self, output: Any) -> Roots:
        return [output.square().sum()], [torch.ones((), dtype=output.dtype)]

    def backward(self, roots: Roots) -> None:
        self._at_backward()
        torch.autograd.backward(*roots)

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def around(last: bool, ghost: bool, ends: bool = True) -> Iterator[None]:
    yield


def test_what_passes_between_stages_is_freed_where_what_forward_keeps_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    module = nn.Sequential(layer(), layer(), nn.Linear(WIDTH, 1)).double()
    inputs = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    assert inputs[0].nbytes > LEAST_BYTES
    for x in inputs:
        module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    work = work_of(trace(module.train(), (inputs[0],), {}), {name: True for name, _ in module.named_parameters()})
    tanhs = [place + 1 for place, node in enumerate(work.nodes) if "tanh" in str(node)]
    stages = cut_at(work, tuple(tanhs))
    alone = Line(0, 1, CPU, None, Broken())
    flow = Flow((0,) * 3, stages.feeds)
    program = Program.build(stages, Cut(Reading(), frozenset(), 1), alone, range(3), module)
    passed, free = list[StorageWeakRef](), list[bool]()
    honest = Portioned.run

    def run(self: Portioned, given: Any, arriving: Any, looker: Any = None) -> Any:
        result = honest(self, given, arriving, looker)
        passed.extend(StorageWeakRef(one.untyped_storage()) for one in (*arriving, *result.leaving.values()))
        return result

    def look() -> None:
        free.extend(one.expired() for one in passed)
        passed.clear()

    @contextmanager
    def saving() -> Iterator[None]:
        mover = Mover(CPU, module.parameters())
        with saved_tensors_hooks(mover.pack, mover.unpack):
            yield

    monkeypatch.setattr(Portioned, "run", run)
    for surrounds, frees in ((saving, True), (nullcontext, False)):
        module.zero_grad()
        free.clear()
        batches = [Batch(x, look) for x in inputs]
        schedule = build_schedule("gpipe", flow, 2)
        Execution(schedule, alone, lambda call: program, batches, around, saving=surrounds).run()
        assert len(free) == 8 and set(free) == {frees}, "two values that leave and arrive, of two microbatches"
        found = [p.grad for p in module.parameters()]
        assert all(p is not None and torch.equal(p, q) for p, q in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer", [lambda: nn.Linear(9, 9), lambda: nn.Conv1d(3, 3, 3, padding=1)])
def test_weight_gradients_that_are_put_off_reach_the_weights(layer: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(layer(), nn.Tanh(), layer()).double()
    inputs = [torch.randn(2, 3, 9, dtype=torch.float64) for _ in range(2)]
    for x in inputs:
        module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    work = work_of(trace(module.train(), (inputs[0],), {}), {name: True for name, _ in module.named_parameters()})
    stages = cut_at(work, (next(place + 1 for place, node in enumerate(work.nodes) if "tanh" in str(node)),))
    alone, flow, later = Line(0, 1, CPU, None, Broken()), Flow((0, 0), stages.feeds), Deferred()
    program = Program.build(stages, Cut(Reading(), frozenset(), 1), alone, range(2), module, later)

    @contextmanager
    def saving() -> Iterator[None]:
        mover = Mover(CPU, module.parameters())
        with saved_tensors_hooks(mover.pack, mover.unpack):
            yield

    schedule = build_schedule("zero-bubble", flow, 2)
    assert any(action.kind is Kind.WEIGHT for action in schedule.actions[0])
    batches = [Batch(x, lambda: None) for x in inputs]
    Execution(schedule, alone, lambda call: program, batches, around, later, saving).run()
    for p, q in zip(module.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q)
