"""From a traced graph to its stages and their flow: what a plan's line of ranks has of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from stretto.graph.assignment import Assignment
from stretto.graph.balance import balanced
from stretto.graph.effects import draws_in
from stretto.graph.named import named_cuts, named_towers
from stretto.graph.stages import Stages, Work, module_of, stages_of, work_of
from stretto.graph.towers import find_towers
from stretto.graph.trace import Traced
from stretto.layout import Layout
from stretto.parallel.measure import Seconds
from stretto.plan import Plan
from stretto.schedule import Flow

_FREE: Final = Layout()


@dataclass(frozen=True)
class Staged:
    """A model in stages.

    Args:
        costs: of each of ``work.nodes``, where it was measured.
        notes: what there is to say to people.
    """

    work: Work
    costs: Sequence[Seconds]
    assignment: Assignment
    stages: Stages
    notes: tuple[str, ...]

    @property
    def flow(self) -> Flow:
        """Of the stages."""
        return Flow(self.assignment.ranks, self.stages.feeds)


def stage(
    traced: Traced,
    trains: Mapping[str, bool],
    plan: Plan,
    measure: Callable[[Work], Sequence[Seconds]],
    given: Assignment | None = None,
    layout: Layout = _FREE,
) -> Staged:
    """Cuts a graph as ``plan`` says: into stages that take as long as one another (``pp``) or into towers (``branch``).

    Args:
        measure: gives the seconds of each of ``work.nodes``; only asked where something is to be decided.
        given: the cut, where another layout of the same model has found it.
        layout: what the task says of it.

    Raises:
        Refused: the graph can't be cut so.
    """
    work, notes = work_of(traced, trains), tuple[str, ...]()
    costs: Sequence[Seconds] = ()
    count = plan.pp * max(1, plan.chunks)
    assignment = given or Assignment.stretches(len(work.nodes))
    if given is None and plan.pp > 1 and layout.cuts:
        assignment = named_cuts(work, layout.cuts, plan.pp, count)
    elif given is None and plan.branch > 1 and layout.towers:
        assignment = named_towers(work, layout.towers, plan.branch)
    elif given is None and plan.line > 1:
        costs = measure(work)
        sums = [sum(both) for both in costs]
        if plan.branch > 1:
            assignment, notes = find_towers(work, sums, plan.branch)
        else:
            starts = balanced(sums, work.edges, work.crossing_bytes(), count)
            assignment = Assignment.stretches(len(work.nodes), starts, plan.pp)
    stages = stages_of(work, assignment)
    if plan.branch > 1:
        notes = (*notes, *_turns(work, assignment, stages))
    return Staged(work, costs, assignment, stages, notes)


def _turns(work: Work, assignment: Assignment, stages: Stages) -> list[str]:
    """Which towers wait for one another though they need nothing of each other."""
    waits = [
        (source, to)
        for source, to in stages.hands_on
        if assignment.ranks[source] != assignment.ranks[to] and to < stages.count - 1
    ]
    found = []
    for source, to in waits:
        if source not in stages.incoming[to]:
            one, other = (_drawing(work.nodes, stages, at) for at in (source, to))
            found.append(
                f"{one} and {other} both draw random numbers, so forward of the second waits for the first, as one "
                "device draws them one after the other; backward runs side by side"
            )
    return found


def _drawing(nodes: Collection[fx.Node], stages: Stages, at: int) -> str:
    return next(module_of(node) for node in nodes if stages.of[node] == at and draws_in(node)) or "operations"
