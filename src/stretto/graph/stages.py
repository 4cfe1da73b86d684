"""A traced graph cut into stages: which stage runs each operation, and what passes between them.

A stage's operations stay in the order in which the model runs them. What a later stage needs of an earlier one goes
straight there, over any number of stages between (skip connections). What depends on the model's arguments alone
(masks, positions), or on parameters alone (their views), is computed again wherever it is used: every stage is called
with the model's own arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import fx

from stretto.errors import Refused
from stretto.graph.assignment import Assignment
from stretto.graph.effects import base_of, draws_in, schema_name, writes, written_in
from stretto.graph.trace import Traced

_NO_STAGES: Final = "stages of it can't run that"
MESSAGE_BYTES: Final = 2**15  # that could be sent in the time that a message takes, however small it is


@dataclass(frozen=True)
class Work:
    """What there is to cut.

    Args:
        nodes: the operations that belong to one stage each, in order.
        free: those that any stage may compute again.
        together: pairs of places in ``nodes``: what lies from the first to the second must stay in one stage, as
            something between them is changed in place, or comes in several parts.
        carries: values that a parameter that trains has a part in, so that somebody wants their gradient.
    """

    traced: Traced
    nodes: tuple[fx.Node, ...]
    free: frozenset[fx.Node]
    together: tuple[tuple[int, int], ...]
    carries: frozenset[fx.Node]

    @property
    def edges(self) -> list[int]:
        """The places in ``nodes`` at which a stage may begin."""
        inside = [0] * (len(self.nodes) + 1)
        for first, last in self.together:
            inside[first + 1] += 1
            inside[last + 1] -= 1
        depth, found = 0, []
        for place in range(1, len(self.nodes)):
            depth += inside[place]
            if not depth:
                found.append(place)
        return found

    def crossing_bytes(self, places: Sequence[int] | None = None) -> list[int]:
        """Of each place in ``nodes`` what would pass it in one call if a stage began there, and the parameters that
        both sides of it would use; each of them with what a message costs beside its bytes.

        Args:
            places: those that run one after the other, where it isn't all; what others need of them passes none.
        """
        nodes = self.nodes if places is None else [self.nodes[one] for one in places]
        place = {node: at for at, node in enumerate(nodes)}
        spans = []
        for node, at in place.items():
            users = [len(nodes) - 1 if user.op == "output" else place.get(user, at) for user in node.users]
            spans.append((at, max(users, default=at), num_bytes_of(node) + MESSAGE_BYTES))
        uses: dict[fx.Node, list[int]] = {}
        for node, at in place.items():
            for parameter in self.parameters(node):
                uses.setdefault(parameter, []).append(at)
        spans += [(places[0], places[-1], num_bytes_of(one) + MESSAGE_BYTES) for one, places in uses.items()]
        steps = [0] * (len(nodes) + 1)
        for first, last, num_bytes in spans:
            steps[first + 1] += num_bytes
            steps[last + 1] -= num_bytes
        return list(accumulate(steps[: len(nodes)]))

    def parameters(self, node: fx.Node) -> list[fx.Node]:
        """The placeholders of the parameters that an operation uses, also through what is computed of them alone."""
        needed = _with_free([node], self.free)
        found = dict.fromkeys(source for one in needed for source in one.all_input_nodes)
        return [source for source in found if source.name in self.traced.parameters]


@dataclass(frozen=True)
class Stages:
    """The graph in stages.

    Args:
        of: of each operation that belongs to one stage, which.
        nodes: of each stage its operations, in order; also those that several compute.
        incoming: of each stage, by the stage that they come from, the values that it needs.
        users: of each parameter the stages that use it, by name.
        carries: values whose gradient somebody wants.
        draws: the stages that draw random numbers, in order.
        changes: of each buffer that forward changes, by name, the stage that does.
    """

    traced: Traced
    of: Mapping[fx.Node, int]
    nodes: tuple[tuple[fx.Node, ...], ...]
    incoming: tuple[Mapping[int, tuple[fx.Node, ...]], ...]
    users: Mapping[str, tuple[int, ...]]
    carries: frozenset[fx.Node]
    draws: tuple[int, ...]
    changes: Mapping[str, int]

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.nodes)

    @property
    def hands_on(self) -> tuple[tuple[int, int], ...]:
        """From which stage to which the random generator's state goes: to the next that draws, and to the last, for
        the loss."""
        if not self.draws:
            return ()
        stops = list(dict.fromkeys([*self.draws, self.count - 1]))
        return tuple(pairwise(stops))

    @property
    def feeds(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages of which the second waits for the first."""
        values = {(source, to) for to, sources in enumerate(self.incoming) for source in sources}
        return tuple(sorted(values | set(self.hands_on)))


def work_of(traced: Traced, trains: Mapping[str, bool], changing: Collection[str] = ()) -> Work:
    """Sorts the operations of a graph.

    Args:
        trains: of each parameter, by name, whether it does.
        changing: buffers that another graph of the model changes, so that only one stage has them as they are.
    """
    nodes = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
    written = written_in(nodes)
    of_parameters = {node for node in traced.graph.graph.nodes if node.name in traced.parameters}
    of_arguments = {node for node in traced.graph.graph.nodes if node.name in traced.arguments}
    work: dict[fx.Node, int] = {}
    for node in nodes:
        sources = node.all_input_nodes
        parametric, fed = not of_parameters.isdisjoint(sources), not of_arguments.isdisjoint(sources)
        changed = any(base_of(one) in written for one in (node, *sources))
        changed = changed or any(traced.buffers.get(one.name) in changing for one in sources)
        if (parametric and fed) or changed or draws_in(node) or any(one in work for one in sources):
            work[node] = len(work)
            parametric = fed = True
        of_parameters |= {node} if parametric else set()
        of_arguments |= {node} if fed else set()
    free = frozenset(node for node in nodes if node not in work)
    together = tuple([*_together(tuple(work), work, written), *_loss_last(traced, tuple(work))])
    return Work(traced, tuple(work), free, together, _carrying(traced, trains))


def stages_of(work: Work, assignment: Assignment) -> Stages:
    """The graph cut as assigned."""
    return _stages(work, dict(zip(work.nodes, assignment.stages, strict=True)), len(assignment.ranks))


def stages_like(work: Work, first: Stages) -> Stages:
    """The cut of another graph of the same model by which each stage does what it did in the first one: the same
    operations of the same modules where these are the same, or else those with the parameters that it used.

    Raises:
        Refused: in this graph the parameters of one stage are used after those of a later one, or by another stage;
            forward changes other buffers, which one stage alone has as they are; or stages wait for others than before.
    """
    found = _stages(work, _by_operation(work, first) or _by_parameters(work, first), first.count)
    elsewhere = [name for name, stages in found.users.items() if not set(stages) <= set(first.users[name])]
    elsewhere += [name for name, stage in found.changes.items() if first.changes.get(name) != stage]
    if elsewhere:
        raise Refused(
            "plan: with a batch of another shape, or in evaluation, another stage than in training uses or changes "
            f"{', '.join(sorted(elsewhere))}; {_NO_STAGES}"
        )
    waits = _waiting(first.feeds, first.count)
    for source, to in found.feeds:
        if source not in waits[to]:  # a schedule may have them the other way round
            raise Refused(
                f"plan: with a batch of another shape, or in evaluation, stage {to} needs something of stage {source}, "
                f"which it does not in training; {_NO_STAGES}"
            )
    return found


def _waiting(feeds: Iterable[tuple[int, int]], count: int) -> list[set[int]]:
    """The stages that each waits for, directly or not."""
    found: list[set[int]] = [set() for _ in range(count)]
    for source, to in sorted(feeds, key=lambda feed: feed[1]):
        found[to] |= {source} | found[source]
    return found


def _by_operation(work: Work, first: Stages) -> dict[fx.Node, int] | None:
    """Each operation where its like was: the same one, of the same module, called as often before. None where an
    operation has no like, or is called another number of times."""
    theirs: dict[object, list[int]] = {}
    loss = frozenset() if work.traced.scored else first.traced.loss or frozenset()
    for node, stage in ((node, stage) for node, stage in first.of.items() if node not in loss):
        theirs.setdefault(_kind(node), []).append(stage)
    ours: dict[object, list[fx.Node]] = {}
    for node in work.nodes:
        ours.setdefault(_kind(node), []).append(node)
    if any(len(theirs.get(kind, ())) != len(nodes) for kind, nodes in ours.items()):
        return None
    of = {node: stage for kind, nodes in ours.items() for node, stage in zip(nodes, theirs[kind], strict=True)}
    apart = any(len({of[node] for node in work.nodes[one : last + 1]}) > 1 for one, last in work.together)
    draws = [of[node] for node in work.nodes if draws_in(node)]
    apart = apart or draws != sorted(draws)
    return None if apart or any(of.get(source, 0) > of[node] for node in of for source in node.all_input_nodes) else of


def _kind(node: fx.Node) -> object:
    return str(node.target), module_of(node)


def _by_parameters(work: Work, first: Stages) -> dict[fx.Node, int]:
    """Each operation in the stage that has its parameters; those without any stay with the one before."""
    users, changes = first.users, first.changes
    of: dict[fx.Node, int] = {}
    now = 0
    for node in work.nodes:
        names = {work.traced.parameters[parameter.name] for parameter in work.parameters(node)}
        read = {work.traced.buffers.get(source.name, "") for source in node.all_input_nodes} & set(changes)
        alone = [*(users[name][0] for name in names if len(users[name]) == 1), *(changes[name] for name in read)]
        if alone and (min(alone) < now or len(set(alone)) > 1):
            raise Refused(
                "plan: with a batch of another shape, or in evaluation, the model uses its layers in another order "
                f"than in training: {', '.join(sorted(names | read))}; {_NO_STAGES}"
            )
        for name in names:
            if now not in users[name] and not alone:  # one of several users of a tied parameter
                later = [stage for stage in users[name] if stage > now]
                now = later[0] if later else now
        now = alone[0] if alone else now
        of[node] = now
    for one, last in work.together:
        for node in work.nodes[one : last + 1]:
            of[node] = of[work.nodes[last]]
    return of


def _stages(work: Work, of: Mapping[fx.Node, int], count: int) -> Stages:
    traced = work.traced
    own: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in work.nodes:
        own[of[node]].append(node)
    output = next(node for node in traced.graph.graph.nodes if node.op == "output")
    nodes, incoming = [], []
    users: dict[str, list[int]] = {name: [] for name in traced.parameters.values()}
    for stage in range(count):
        needed = _with_free([*own[stage], *([output] if stage == count - 1 else [])], work.free)
        nodes.append(tuple(node for node in traced.graph.graph.nodes if node in needed and node.op == "call_function"))
        arriving: dict[int, list[fx.Node]] = {}
        for node in traced.graph.graph.nodes:
            if node in needed:
                continue
            if any(user in needed for user in node.users):
                if node in of:
                    arriving.setdefault(of[node], []).append(node)
                elif node.name in traced.parameters and stage not in users[traced.parameters[node.name]]:
                    users[traced.parameters[node.name]].append(stage)
        incoming.append({source: tuple(values) for source, values in sorted(arriving.items())})
    draws = sorted({of[node] for node in work.nodes if draws_in(node)})
    return Stages(
        traced,
        of,
        tuple(nodes),
        tuple(incoming),
        {name: tuple(found or [0]) for name, found in users.items()},
        work.carries,
        tuple(draws),
        _changes(traced, of, output),
    )


def _changes(traced: Traced, of: Mapping[fx.Node, int], output: fx.Node) -> dict[str, int]:
    results: Any = output.args[0]
    found = {name: of[node] for name, node in zip(traced.mutated, results, strict=False) if node in of}
    for node, stage in of.items():
        for base in map(base_of, writes(node)):
            if base.name in traced.buffers:
                found[traced.buffers[base.name]] = stage
    return found


def _carrying(traced: Traced, trains: Mapping[str, bool]) -> frozenset[fx.Node]:
    found: set[fx.Node] = set()
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder":
            if trains.get(traced.parameters.get(node.name, ""), False):
                found.add(node)
        elif node.op == "call_function" and schema_name(node) != "aten::detach":
            value = node.meta.get("val")
            differentiable = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
            if differentiable and any(source in found for source in node.all_input_nodes):
                found.add(node)
    return frozenset(found)


def _together(
    work: Sequence[fx.Node],
    place: Mapping[fx.Node, int],
    written: Mapping[fx.Node, list[fx.Node]],
) -> Iterable[tuple[int, int]]:
    family: dict[fx.Node, list[int]] = {}
    for node in work:
        for one in (node, *node.all_input_nodes):
            base = base_of(one)
            if base in written:
                family.setdefault(base, []).append(place[node])
    for base, places in family.items():
        # Of a value, all up to its last change; of a buffer or an argument, all that looks at it.
        last = max(places) if base.op == "placeholder" else max(place[writer] for writer in written[base])
        yield min(places), last
    for node in work:
        parts = [place[user] for user in node.users if user.target is operator.getitem and user in place]
        if parts:
            yield place[node], max(parts)


def _loss_last(traced: Traced, work: Sequence[fx.Node]) -> Iterable[tuple[int, int]]:
    """The loss belongs to the last stage, and with it the operation before it, so that no stage is the loss alone."""
    first = next((place for place, node in enumerate(work) if node in (traced.loss or ())), 0)
    if first:
        yield first - 1, len(work) - 1


def num_bytes_of(node: fx.Node) -> int:
    """Of what an operation gives."""
    value: Any = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor))


def _with_free(nodes: Iterable[fx.Node], free: frozenset[fx.Node]) -> set[fx.Node]:
    """The nodes, and what of the free ones they need, directly or not."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node in found:
            continue
        found.add(node)
        left += [source for source in node.all_input_nodes if source in free]
    return found


def module_of(node: fx.Node) -> str:
    """The module that an operation belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""
