"""From a traced graph to its stages and their flow: what a plan's line of ranks has of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from stretto.graph.assignment import Assignment
from stretto.graph.balance import balanced
from stretto.graph.effects import draws_in
from stretto.graph.lanes import Shape, assigned
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
    """Cuts a graph as ``plan`` says: into stages that take as long as one another (``pp``), into towers (``branch``),
    or into towers of such stages.

    Args:
        measure: gives the seconds of each of ``work.nodes``; only asked where something is to be decided.
        given: the cut, where another layout of the same model has found it.
        layout: what the task says of it.

    Raises:
        Refused: the graph can't be cut so.
    """
    work, notes = work_of(traced, trains), tuple[str, ...]()
    costs: Sequence[Seconds] = ()
    if given is not None or plan.line == 1:
        assignment = given or Assignment.stretches(len(work.nodes))
    elif plan.branch == 1 and layout.cuts:
        assignment = named_cuts(work, layout.cuts, plan.pp, plan.pp * plan.chunks)
    else:
        named = plan.branch > 1 and bool(layout.towers)
        costs = [] if named and plan.pp == 1 else measure(work)
        assignment, notes = _cut(work, [sum(both) for both in costs], plan, layout)
    stages = stages_of(work, assignment)
    if plan.branch > 1:
        notes = (*notes, *_turns(work, assignment, stages))
    return Staged(work, costs, assignment, stages, notes)


def _cut(work: Work, costs: Sequence[float], plan: Plan, layout: Layout) -> tuple[Assignment, tuple[str, ...]]:
    """Into stages or towers or both, and what there is to say of it."""
    chunks = max(1, plan.chunks)
    if plan.branch == 1:
        starts = balanced(costs, work.edges, work.crossing_bytes(), plan.pp * chunks)
        return Assignment.stretches(len(work.nodes), starts, plan.pp), ()
    said = "the cuts of layout() are for pp alone, and inactive: beside branch each tower is cut where it is balanced"
    notes = (said,) if plan.pp > 1 and layout.cuts else ()
    if layout.towers:
        groups = named_towers(work, layout.towers, plan.branch)
        return assigned(work, costs, groups, Shape(plan.branch, plan.pp, chunks)), notes
    assignment, found = find_towers(work, costs, plan.branch, plan.pp, chunks)
    return assignment, (*notes, *found)


def _turns(work: Work, assignment: Assignment, stages: Stages) -> list[str]:
    """Which towers wait for one another though they need nothing of each other."""
    waits = [
        (source, to)
        for source, to in stages.hands_on
        if assignment.ranks[source] != assignment.ranks[to] and to < stages.count - 1
    ]
    needs: list[set[int]] = []  # of each stage, all those that it needs something of, directly or not
    for sources in stages.incoming:
        needs.append(set(sources).union(*(needs[source] for source in sources)))
    found = []
    for source, to in waits:
        if source not in needs[to]:
            one, other = (_drawing(work.nodes, stages, at) for at in (source, to))
            found.append(
                f"{one} and {other} both draw random numbers, so forward of the second waits for the first, as one "
                "device draws them one after the other; backward runs side by side"
            )
    return found


def _drawing(nodes: Collection[fx.Node], stages: Stages, at: int) -> str:
    return next(module_of(node) for node in nodes if stages.of[node] == at and draws_in(node)) or "operations"
