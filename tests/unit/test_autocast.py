"""A graph traced under autocast, run under it, is the model under it: the same types and the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from stretches import cut_at
from stretto.comm.members import Broken, Members
from stretto.data import seed_everything, tensors_in
from stretto.graph.autocast import cast_apart
from stretto.graph.stages import work_of
from stretto.graph.trace import Scoring, Traced, filled, trace
from stretto.parallel._base import Example, Roots
from stretto.parallel.deferred import Deferred, defer, work_off
from stretto.parallel.inside import cut_inside, give_parts, parts_of
from stretto.parallel.measure import costs_of
from stretto.parallel.program import Program
from stretto.parallel.template import Template
from stretto.precision import computing
from stretto.task import load_task

ROOT = Path(__file__).resolve().parents[2]
AUTOCAST = partial(computing, "bf16-autocast")
GPT = {"depth": "2", "width": "32", "context": "16", "heads": "2"}
TASKS: tuple[tuple[str, dict[str, str]], ...] = (
    ("examples/gpt", GPT),
    ("tests/tasks/vit.py", {}),
    ("tests/tasks/lstm.py", {}),
    ("tests/tasks/cnn_skips.py", {}),
    ("tests/tasks/cnn_skips.py", {"norm": "group", "drop": "0.3"}),
    ("tests/tasks/towers.py", {}),
)


class Typed(fx.Interpreter):
    """Holds what each operation gives against what the trace says of it."""

    low = 0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for said, one in zip(tree_leaves(n.meta.get("val")), tree_leaves(value), strict=False):
            if isinstance(said, Tensor) and isinstance(one, Tensor):
                assert (one.dtype, one.shape) == (said.dtype, said.shape), n
                self.low += one.dtype == torch.bfloat16
        return value


class Alone:
    """A task's model, and what one call of it gives."""

    def __init__(self, path: str, sets: dict[str, str], training: bool = True) -> None:
        self.task = load_task(ROOT / path, {**sets, "precision": "bf16-autocast"})
        seed_everything(0)
        self.model = self.task.model().train(training)
        data = self.task.data()["train"]
        self.batch = self.task.collate([data[at] for at in range(5)])
        self.call = self.task.inputs(self.batch, self.model.forward)
        self.buffers = {name: one.clone() for name, one in self.model.named_buffers()}

    def traced(self, scored: bool) -> Traced:
        return trace(self.model, *self.call, Scoring(self.task.losses, self.batch) if scored else None, AUTOCAST)

    def by_model(self) -> Any:
        arguments, keywords = self.call
        return self.task.losses(self.model(*arguments, **keywords), self.batch)

    def by_graph(self, traced: Traced) -> Any:
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        given = (*self.call, self.batch) if traced.scored else self.call
        run = Typed(traced.graph)
        found = run.run(*traced.bound(held, given))
        assert run.low, "autocast computes nothing in bfloat16"
        with torch.no_grad():
            for name, value in zip(traced.mutated, found, strict=False):
                held[name].copy_(value)
        output = filled(traced.output, found[len(traced.mutated) :])
        return output if traced.scored else self.task.losses(output, self.batch)

    def step(self, losses: Any) -> dict[str, Tensor]:
        """The loss, every gradient and every buffer."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        torch.manual_seed(3)
        with AUTOCAST():
            total = next(iter(losses().values()))[0]
        if total.requires_grad:
            total.backward()
        gradients = {f"gradient {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": total, **gradients, **{n: b.clone() for n, b in self.model.named_buffers()}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("path", "sets"), TASKS)
def test_the_graph_has_the_types_and_the_bits_of_the_model(path: str, sets: dict[str, str], scored: bool) -> None:
    alone = Alone(path, sets)
    drawn = torch.get_rng_state()
    traced = alone.traced(scored)
    assert torch.equal(drawn, torch.get_rng_state()) and traced.autocast
    same(alone.step(alone.by_model), alone.step(lambda: alone.by_graph(traced)))


@pytest.mark.parametrize(("path", "sets"), [one for one in TASKS if "vit" not in one[0]])
def test_so_it_has_in_evaluation(path: str, sets: dict[str, str]) -> None:
    """Not torch's own encoder layer, which has another kernel where no gradients are wanted, in any precision."""
    alone = Alone(path, sets, training=False)
    traced = alone.traced(scored=False)
    with torch.no_grad():
        same(alone.step(alone.by_model), alone.step(lambda: alone.by_graph(traced)))


class Types:
    """A looker that holds what a rank computes against the trace."""

    def __init__(self) -> None:
        self.seen = 0

    def enter(self, stage: int, microbatch: int, program: Program, given: Sequence[Tensor]) -> None: ...

    def see(self, node: fx.Node, value: Any, arrived: bool) -> None:
        for said, one in zip(tree_leaves(node.meta.get("val")), tree_leaves(value), strict=False):
            if isinstance(said, Tensor) and isinstance(one, Tensor):
                assert one.dtype == said.dtype, node
                self.seen += one.dtype == torch.bfloat16


@pytest.mark.parametrize(("path", "sets"), [TASKS[0], TASKS[4]])
def test_what_is_done_in_the_place_of_operations_gives_their_types(path: str, sets: dict[str, str]) -> None:
    """Sums over ranks with their biases, dropout of a part, and the loss of a part of the classes."""
    alone, members = Alone(path, sets), Members(0, 1, torch.device("cpu"), None, Broken())
    traced, template = alone.traced(scored=True), Template(alone.model)
    cut = cut_inside(traced, template, 2, "")
    stages = cut_at(work_of(traced, template.trainable), ())
    give_parts(alone.model, parts_of(cut, traced, template, 0))
    looker = Types()
    with AUTOCAST():
        program = Program.build(stages, cut, members, [0], alone.model)
        program.portions[0].run(list(tensors_in((*alone.call, alone.batch))), [], looker)
    assert looker.seen > 10


def test_operations_are_measured_as_they_run() -> None:
    alone, seen = Alone(*TASKS[0]), set[tuple[torch.dtype, bool]]()

    def loss(output: Tensor) -> Roots:
        seen.add((output.dtype, torch.is_autocast_enabled("cpu")))
        return [output.float().sum()], [torch.ones(())]

    traced, example = alone.traced(scored=False), Example(alone.call, loss, surround=AUTOCAST)
    work = work_of(traced, {name: True for name, _ in alone.model.named_parameters()})
    assert len(costs_of(work, alone.model, alone.model, example)) == len(work.nodes)
    assert seen == {(torch.bfloat16, True)}


class Regions(nn.Module):
    """Layers of which a user takes one out of autocast, and one to it where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.autocast("cpu", enabled=False):
            x = self.two(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            return self.three(x)


@pytest.mark.parametrize("surround", [AUTOCAST, partial(computing, "fp32")])
def test_a_users_own_regions_are_kept(surround: Any) -> None:
    module, x = Regions(), torch.randn(4, 6)
    traced = trace(module, (x,), {}, surround=surround)
    with surround():
        expected = module(x)
        (found,) = Typed(traced.graph).run(*traced.bound(dict(module.named_parameters()), ((x,), {})))
    assert traced.autocast is (surround is AUTOCAST)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


class Twice(nn.Module):
    """[*, 6] to [*, 6]; a layer, a norm and a factor that are used twice, and a table that is a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.table = nn.Linear(6, 6), nn.LayerNorm(6), nn.Embedding(6, 6)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for _ in range(2):
            x = self.norm(self.layer(x)) * self.factor
        return nn.functional.linear(x, self.table.weight)


@pytest.mark.parametrize("surround", [AUTOCAST, partial(computing, "fp32")])
def test_a_parameter_that_is_cast_in_two_stages_is_told_from_one_that_is_used_there(surround: Any) -> None:
    traced = trace(Twice(), (torch.arange(5),), {}, surround=surround)
    nodes = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
    of = {node: at for at, node in enumerate(nodes)}
    assert cast_apart(traced, of) == ({"layer.weight", "layer.bias"} if surround is AUTOCAST else set())
    assert cast_apart(traced, dict.fromkeys(of, 0)) == set()


class Layers(nn.Module):
    """[batch, 2, 8] to [batch, 4]; a layer that is used twice among others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.again, self.last = nn.Conv1d(2, 2, 3, padding=1), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.again(self.conv(x))))
        return self.last(x.flatten(1))


def gradients(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        assert parameter.grad is not None
        yield parameter.grad.clone()
    module.zero_grad(set_to_none=True)


def test_gradients_that_are_put_off_are_rounded_as_torchs() -> None:
    torch.manual_seed(2)
    module, x = Layers(), torch.randn(64, 2, 8)
    traced = trace(module, (x,), {}, surround=AUTOCAST)
    values = traced.bound(dict(module.named_parameters()), ((x,), {}))
    with AUTOCAST():
        expected = module(x)
    expected.float().square().sum().backward()
    wanted = list(gradients(module))
    deferred = Deferred()
    defer(traced.graph, set(traced.parameters), deferred)
    with AUTOCAST():
        (found,) = traced.graph(*values)
    assert torch.equal(found, expected)
    put_off = deferred.collect(lambda: found.float().square().sum().backward())
    assert len(put_off) == 2, "the layer that is used twice isn't put off, as its gradients are added up in bfloat16"
    work_off(put_off)
    for one, other in zip(gradients(module), wanted, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
