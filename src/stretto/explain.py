"""What a plan makes of a model, said before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from stretto.assemble import HOST, build_template, example_of
from stretto.features import Feature, features_of
from stretto.graph.cut import Cut, report
from stretto.graph.regions import NONE, find_regions
from stretto.graph.stages import Stages, Work, module_of, num_bytes_of
from stretto.graph.trace import Traced
from stretto.mesh import Mesh
from stretto.observe import free_bytes
from stretto.parallel import Example, Template
from stretto.parallel.apply import LINE, check
from stretto.parallel.copies import blank_model, narrowed
from stretto.parallel.faithful import unlike
from stretto.parallel.inside import cut_inside
from stretto.parallel.measure import Seconds, costs_of
from stretto.parallel.scored import trace_step
from stretto.parallel.staged import Staged, stage
from stretto.plan import Plan
from stretto.precision import COMPUTE
from stretto.schedule import Costs, Timeline, build_schedule, simulate
from stretto.task import Task

_NO_LINE: Final = Mesh(())


@dataclass(frozen=True)
class Row:
    """One parameter.

    Args:
        share: of its elements on the rank that has the most.
        stages: of a pipeline, those that use it.
        why: how it is cut, or why it is whole.
    """

    name: str
    shape: tuple[int, ...]
    share: float
    stages: tuple[int, ...]
    why: str

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StageRow:
    """One stage of the model.

    Args:
        rank: its place on the line of ``branch`` and ``pp``.
        first: the module where it begins; ``last``: where it ends.
        elements: of the parameters that a rank of it holds.
        forward_seconds: of one microbatch, measured here; likewise ``backward_seconds``.
        sends: bytes that one microbatch sends to later stages, by stage.
    """

    stage: int
    rank: int
    first: str
    last: str
    elements: int
    forward_seconds: float
    backward_seconds: float
    sends: dict[int, int]


@dataclass(frozen=True)
class Explained:
    """What there is to say of a plan.

    Args:
        timeline: a step of its stages by arithmetic, where it has several.
        line: the axes over which they lie.
    """

    plan: str
    features: tuple[Feature, ...]
    parameters: tuple[Row, ...]
    stages: tuple[StageRow, ...] = ()
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()
    line: Mesh = _NO_LINE

    def place(self, row: StageRow) -> str:
        """Where a stage is, as ``branch=1,pp=0``."""
        return self.line.describe(row.rank).replace(" ", "")

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        found: dict[str, Any] = {
            "plan": self.plan,
            "features": [asdict(feature) for feature in self.features],
            "parameters": [asdict(row) for row in self.parameters],
            "stages": [{**asdict(row), "place": self.place(row)} for row in self.stages],
            "notes": list(self.notes),
        }
        if self.timeline is not None:
            found |= {"step_seconds": self.timeline.seconds, "bubble": self.timeline.bubble}
        return found


def explain(task: Task, plan: Plan) -> Explained:
    """Builds the model, and traces and measures it where the plan wants that; all in this process.

    Raises:
        Refused: the plan doesn't fit the model, or the model can't be traced.
    """
    template = build_template(task)
    check(template, plan)
    if not plan.traced:
        rows = [Row(name, spec.shape, 1.0, (), "whole") for name, spec in template.specs.items()]
        return Explained(str(plan), features_of(plan), tuple(rows))
    example, types = example_of(task, plan, template, None), narrowed(template, COMPUTE[task.recipe.precision])
    blank = partial(blank_model, template, HOST, types)

    def measure(work: Work) -> list[Seconds]:
        return costs_of(work, blank(), template.structure, example)

    traced, unscored = _trace(template, blank, example, plan)
    staged = stage(traced, template.trainable, plan, measure, layout=template.layout)
    cut = cut_inside(traced, template, plan.tp, unscored)
    rows = _parameters(template, traced, cut, staged.stages, plan)
    regions = find_regions(cut, traced) if plan.sequence else NONE
    features = features_of(plan, regions.why, regions.lengths)
    if plan.line == 1:
        return Explained(str(plan), features, tuple(rows), notes=cut.notes)
    described = _stages(staged, staged.costs or measure(staged.work), rows)
    seconds = tuple(row.forward_seconds for row in described), tuple(row.backward_seconds for row in described)
    costs = Costs(*seconds, (0.5,) * len(described))
    step = simulate(build_schedule(plan.schedule, staged.flow, plan.microbatches), costs)
    line = Mesh(tuple((axis, degree) for axis, degree in plan.mesh.axes if axis in LINE))
    return Explained(str(plan), features, tuple(rows), tuple(described), step, (*cut.notes, *staged.notes), line)


def _trace(
    template: Template, blank: Callable[[], nn.Module], example: Example, plan: Plan
) -> tuple[Traced, str]:
    """As a run would have it."""

    def differs(traced: Traced) -> str:
        return unlike(traced, blank(), template.structure, example, free_bytes(HOST))[0]

    return trace_step(blank().train(), example, plan, differs)


def _parameters(template: Template, traced: Traced, cut: Cut, stages: Stages, plan: Plan) -> list[Row]:
    said = report(cut, traced) if cut.axes else {}
    nodes = {traced.parameters.get(node.name): node for node in traced.graph.graph.nodes}
    rows = []
    for name, spec in template.specs.items():
        most = spec.numel
        if cut.axes:
            dims = cut.reading.of(nodes[name])
            most = max(math.prod(cut.part(dims, rank).shape) for rank in range(plan.tp))
        share = most / spec.numel if spec.numel else 1.0
        rows.append(Row(name, spec.shape, share, stages.users[name], said.get(name, "whole")))
    return rows


def _stages(staged: Staged, costs: Sequence[Seconds], rows: list[Row]) -> list[StageRow]:
    stages, found = staged.stages, []
    for number, rank in enumerate(staged.assignment.ranks):
        places = [place for place, at in enumerate(staged.assignment.stages) if at == number]
        sends = {
            to: sum(num_bytes_of(node) for node in sources[number])
            for to, sources in enumerate(stages.incoming)
            if number in sources
        }
        elements = sum(round(row.numel * row.share) for row in rows if number in row.stages)
        forward, backward = (sum(costs[place][at] for place in places) for at in (0, 1))
        names = [name for name in (module_of(staged.work.nodes[place]) for place in places) if name]
        first, last = (names[0], names[-1]) if names else ("", "")
        found.append(StageRow(number, rank, first, last, elements, forward, backward, sends))
    return found
