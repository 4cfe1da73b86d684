"""A stage of the traced graph in pieces, which backward computes again, or whose parameters come piece after piece.

Where a layer-by-layer choice would need the model's modules, this takes stretches of its operations, at the places past
which least passes (:mod:`stretto.graph.pieces`). The ranks that cut a model inside choose alike, so all of them compute
the same piece again at the same time: ``full`` adds their sums up once more then, as keeping them would cost as much
memory as the pieces' inputs; ``selective`` keeps the sums beside the matrix products that they are made of, and sends
nothing. Buffers that forward changes in place are changed by the first forward; the second one has copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from stretto.graph.effects import written_in
from stretto.graph.localize import ENTER, WHOLE, Localizer, Portion
from stretto.graph.pieces import even_starts, piece_starts, weighed
from stretto.graph.stages import Work, _together
from stretto.graph.trace import Traced, let_go
from stretto.parallel import gathered
from stretto.parallel.again import Piece, Told
from stretto.parallel.gathered import Names, Pieces, Visit

RunGraph = Callable[[fx.GraphModule, Sequence[Any]], Sequence[Any]]
"""Runs a graph on values for its placeholders; where somebody looks on, shows what it computes."""


@dataclass(frozen=True)
class Repeating:
    """How stages are computed again.

    Args:
        how: ``selective`` or ``full``.
        ahead: of each stage, how many microbatches forward has run for when backward begins.
        surround: what surrounds forward.
        moved: what forward keeps lies on the host until backward.
    """

    how: str
    ahead: Mapping[int, int]
    surround: Callable[[], AbstractContextManager[Any]]
    moved: bool = False


class Stretches:
    """A portion of the graph, to be run in pieces.

    Args:
        fixed: the placeholders of what is there anyway (parameters, buffers, constants); the others are values.
        repeating: how backward computes them again; None: it doesn't, and they are of about as many parameters each.
        told: what the portion hears from other ranks and isn't to ask for again.
        known: where pieces begin; a stage's first ones are noted there.
    """

    def __init__(
        self,
        portion: Portion,
        stage: int,
        localizer: Localizer,
        traced: Traced,
        repeating: Repeating | None,
        told: Told,
        known: Pieces | None = None,
    ) -> None:
        graph = portion.graph
        nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
        written = written_in(graph.graph.nodes)
        place = {node: at for at, node in enumerate(nodes)}
        edges = Work(traced, tuple(nodes), frozenset(), tuple(_together(nodes, place, written)), frozenset()).edges
        operations = [str(node.target) for node in nodes]
        first = None if known is None else known.get(stage)
        if first is not None and first[0] == operations:
            starts = first[1]
        elif repeating is None or first is not None:
            starts = _starts(nodes, edges, traced, localizer)
        else:
            made, passing = weighed(nodes, localizer.mean_bytes, _entered)
            starts = piece_starts(made, passing, edges, repeating.ahead[stage])
        if known is not None and first is None:
            known[stage] = operations, starts
        self._inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        fixed = {*traced.parameters, *traced.buffers, *traced.constants} & set(portion.bound)
        held = {node for node in self._inputs if node.name in fixed}
        (self._outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        self.pieces: list[_Stretch] = []
        for begin, end in pairwise([0, *starts, len(nodes)]):
            shown = {node for piece in self.pieces for node in piece.given}
            stretch = _Stretch(graph, nodes[begin:end], held, frozenset(written), shown)
            name = f"piece {len(self.pieces) + 1} of stage {stage}"
            if repeating is not None:
                how, moved = repeating.how, repeating.moved
                around = repeating.surround
                stretch.piece = Piece(name, [], stretch.run, how=how, surround=around, told=told, moved=moved)
            self.pieces.append(stretch)
        self.parameters: list[Names] = [
            tuple(traced.parameters[node.name] for node in piece.fixed if node.name in traced.parameters)
            for piece in self.pieces
        ]

    def run(self, values: Sequence[Any], run_graph: RunGraph, visit: Visit | None = None) -> list[Any]:
        """What the graph gives for ``values`` of its placeholders; ``visit`` has the parameters there."""
        env: dict[fx.Node, Any] = dict(zip(self._inputs, values, strict=True))
        needed = {node for node in self._outputs if node is not None}
        last = {node: at for at, piece in enumerate(self.pieces) for node in piece.given}
        for at, piece in enumerate(self.pieces):
            if visit is not None:
                visit.enter(self.parameters[at])
            found = piece(env, run_graph)
            if visit is not None:
                found = visit.leave(self.parameters[at], found)
            env.update(zip(piece.outputs, found, strict=True))
            for node in piece.given:
                if last[node] == at and node not in needed:
                    del env[node]
        return [None if node is None else env[node] for node in self._outputs]

    def let_go(self) -> None:
        """See :meth:`stretto.parallel.program.Program.let_go`."""
        for piece in self.pieces:
            let_go(piece.graph, WHOLE)


class _Stretch:
    """Some operations of a graph in a row.

    Args:
        held: placeholders of what is there anyway.
        written: what the graph changes in place.
        shown: values that stretches before it were given too.
    """

    piece: Piece | None = None

    def __init__(
        self,
        of: fx.GraphModule,
        nodes: Sequence[fx.Node],
        held: set[fx.Node],
        written: frozenset[fx.Node],
        shown: set[fx.Node],
    ) -> None:
        own = set(nodes)
        given = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
        values = [node for node in given if node.op != "get_attr"]
        self.fixed = [node for node in values if node in held]
        self.moving = [node for node in values if node not in held]
        self.given = [*self.fixed, *self.moving]
        self.outputs = [node for node in nodes if any(user not in own for user in node.users)]
        self._written = [at for at, node in enumerate(self.fixed) if node in written]
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.given:
            env[node] = graph.placeholder(node.name)
            if node.op == "placeholder" and node not in shown and WHOLE in node.meta:
                env[node].meta[WHOLE] = node.meta[WHOLE]
        for node in (*(node for node in given if node.op == "get_attr"), *nodes):
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in self.outputs))
        self.graph = fx.GraphModule(of, graph)

    def __call__(self, env: Mapping[fx.Node, Any], run_graph: RunGraph) -> Sequence[Any]:
        if self.piece is None:
            return run_graph(self.graph, [env[node] for node in self.given])
        call = _Call([env[node] for node in self.fixed], self._written, run_graph)
        found: Sequence[Any] = self.piece(*(env[node] for node in self.moving), call=call)
        return found

    def run(self, *values: Any, call: _Call) -> Sequence[Any]:
        """The operations' results that others need."""
        fixed, run_graph = call.begin()
        return run_graph(self.graph, [*fixed, *values])


class _Call:
    """One microbatch's way through a stretch: the first time it is looked at and changes buffers, later it isn't and
    changes copies. Both copy alike, for torch compares what the two forwards call where ``selective`` keeps results."""

    def __init__(self, fixed: list[Any], written: Sequence[int], run_graph: RunGraph) -> None:
        self._fixed, self._written, self._run_graph = fixed, written, run_graph
        self._before: dict[int, torch.Tensor] | None = None

    def begin(self) -> tuple[list[Any], RunGraph]:
        """What is there, and how the operations are run."""
        if self._before is None:
            self._before = {at: self._fixed[at].clone() for at in self._written}
            run_graph, self._run_graph = self._run_graph, plainly
            return self._fixed, run_graph
        fixed = list(self._fixed)
        for at, value in self._before.items():
            fixed[at] = value.clone()
        return fixed, plainly


def plainly(graph: fx.GraphModule, values: Sequence[Any]) -> Sequence[Any]:
    """Not by calling the module: what ends a second forward early is no error that it should explain."""
    found: Sequence[Any] = graph.forward(*values)
    return found


def _entered(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if node.op == "call_module" and node.target == ENTER else None


def _starts(nodes: Sequence[fx.Node], edges: Sequence[int], traced: Traced, localizer: Localizer) -> list[int]:
    """Where pieces begin, so that of each the parameters that no piece before it uses are about as many."""
    seen: set[fx.Node] = set()
    weights = []
    for node in nodes:
        new = {one for one in node.all_input_nodes if one.op == "placeholder" and one.name in traced.parameters} - seen
        seen |= new
        weights.append(sum(localizer.mean_bytes(one) for one in new))
    return even_starts(weights, edges, max(gathered.LEAST_BYTES, sum(weights) // gathered.PIECES))
