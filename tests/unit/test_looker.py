"""A looker is shown every operation of a stage, also where layers put their weights' gradients off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from stretches import cut_at
from stretto.comm.members import Broken, Members
from stretto.graph.cut import Cut
from stretto.graph.reading import Reading
from stretto.graph.stages import work_of
from stretto.graph.trace import trace
from stretto.parallel.deferred import Deferred
from stretto.parallel.program import Program


class Noted:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: dict[fx.Node, tuple[Any, bool]] = {}

    def enter(self, stage: int, microbatch: int, program: Program, given: Sequence[torch.Tensor]) -> None: ...

    def see(self, node: fx.Node, value: Any, arrived: bool) -> None:
        self.seen[node] = value, arrived


@pytest.mark.parametrize(("deferred", "lets_go"), [(None, False), (Deferred(), False), (None, True)])
def test_every_operation_is_shown_with_its_value_and_the_result_is_the_same(
    deferred: Deferred | None, lets_go: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    traced = trace(model, (x,), {})
    stages = cut_at(work_of(traced, {name: True for name, _ in model.named_parameters()}), (2,))
    alone = Members(0, 1, torch.device("cpu"), None, Broken())
    program = Program.build(stages, Cut(Reading(), frozenset(), 1), alone, [0, 1], model, deferred)
    if lets_go:
        assert type(traced.output) is torch.Tensor and traced.output.grad_fn is None
        made = [weakref.ref(node.meta["val"]) for node in traced.graph.graph.nodes if "val" in node.meta]
        assert all(isinstance(one(), FakeTensor) for one in made)
        program.let_go()
        gc.collect()
        assert made and not any(one() is not None for one in made), "what the trace was made with is gone"
    (middle,) = program.portions[0].run([x], []).leaving.values()
    looker = Noted()
    output = program.portions[1].run([x], [middle], looker).output
    own = [node for node in traced.graph.graph.nodes if node in stages.nodes[1]]
    assert len(own) == 3 and set(own) <= looker.seen.keys(), "linear, tanh and linear"
    assert {str(node) for node, (_, arrived) in looker.seen.items() if arrived} == {"tanh"}
    hidden = model[2](middle)
    for node, value in zip(own, (hidden, torch.tanh(hidden), model[4](torch.tanh(hidden))), strict=True):
        assert torch.equal(looker.seen[node][0], value)
    assert torch.equal(output, model(x))
