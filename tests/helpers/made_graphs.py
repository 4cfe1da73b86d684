"""Graphs made by hand: of each operation, which ones it needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stretto.graph.assignment import Assignment
from stretto.graph.effects import draws_in
from stretto.graph.stages import Work, stages_of, work_of
from stretto.graph.trace import Traced

Needs = Sequence[tuple[int, ...]]  # of each operation those that it needs; one that needs none has the argument


def work(needs: Needs, draws: Sequence[int] = ()) -> Work:
    """Operations that add up what they need and a parameter; those in ``draws`` then drop some of it."""
    graph, value = fx.Graph(), torch.zeros(2, 3)
    argument, parameter = graph.placeholder("x"), graph.placeholder("p")
    found: list[fx.Node] = []
    for at, sources in enumerate(needs):
        node = parameter
        for source in [found[one] for one in sources] or [argument]:
            node = graph.call_function(torch.ops.aten.add.Tensor, (node, source))
        if at in draws:
            node = graph.call_function(torch.ops.aten.dropout.default, (node, 0.5, True))
        found.append(node)
    used = {source for sources in needs for source in sources}
    graph.output([node for at, node in enumerate(found) if at not in used])
    for node in graph.nodes:
        node.meta["val"] = value
    module = fx.GraphModule(torch.nn.Module(), graph)
    traced = Traced(module, {"p": "p"}, {}, {}, ("x",), (), None)
    return work_of(traced, {"p": True})


def random_work(drawn: random.Random) -> tuple[Work, list[float]]:
    """Any graph, some of whose operations draw random numbers, and what each operation costs."""
    count = drawn.randrange(4, 24)
    needs = [tuple(sorted(drawn.sample(range(at), min(at, drawn.choice((0, 1, 1, 1, 2)))))) for at in range(count)]
    graph = work(needs, draws=[at for at in range(count) if drawn.random() < 0.3])
    return graph, [drawn.random() for _ in graph.nodes]


def check_assignment(graph: Work, found: Assignment, degree: int) -> None:
    """Its stages can run in their order, and draw random numbers in that; every rank has one."""
    stage: dict[Any, int] = dict(zip(graph.nodes, found.stages, strict=True))
    assert all(stage.get(source, 0) <= stage[node] for node in graph.nodes for source in node.all_input_nodes)
    draws = [stage[node] for node in graph.nodes if draws_in(node)]
    assert draws == sorted(draws), "a generator passes each stage once"
    assert set(found.ranks) == set(range(degree)) and found.ranks[-1] == degree - 1
    assert Assignment.from_json(found.to_json()) == found
    stages_of(graph, found)
