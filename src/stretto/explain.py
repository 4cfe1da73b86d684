"""What a plan makes of a model, said before anything is launched."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from stretto.assemble import build_template, example_of
from stretto.features import Feature, features_of
from stretto.graph.balance import balanced
from stretto.graph.cut import Cut, plan_cut, report
from stretto.graph.reading import Reading
from stretto.graph.rules import read
from stretto.graph.stages import Stages, Work, stages_at, work_of
from stretto.graph.trace import Traced, trace
from stretto.parallel import Template
from stretto.parallel.apply import check
from stretto.parallel.measure import Seconds, costs_of
from stretto.plan import Plan
from stretto.precision import computing
from stretto.schedule import Costs, Flow, Timeline, build_schedule, simulate
from stretto.task import Task


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
    """One stage of a pipeline.

    Args:
        rank: of the pipeline.
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
    """What there is to say of a plan; ``timeline``: a step of its pipeline by arithmetic, where it has one."""

    plan: str
    features: tuple[Feature, ...]
    parameters: tuple[Row, ...]
    stages: tuple[StageRow, ...] = ()
    timeline: Timeline | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        found: dict[str, Any] = {
            "plan": self.plan,
            "features": [asdict(feature) for feature in self.features],
            "parameters": [asdict(row) for row in self.parameters],
            "stages": [asdict(row) for row in self.stages],
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
    if plan.tp * plan.pp == 1:
        rows = [Row(name, spec.shape, 1.0, (), "whole") for name, spec in template.specs.items()]
        return Explained(str(plan), features_of(plan), tuple(rows))
    example = example_of(task, plan, template, None)
    with computing(task.recipe.precision):
        traced = trace(template.structure.train(), *example.call)
        work = work_of(traced, template.trainable)
        count = plan.num_stages
        costs = costs_of(work, template.structure, template.structure, example) if count > 1 else []
    edges, sums = work.edges, [sum(both) for both in costs]
    starts = balanced(sums, edges, work.crossing_bytes(), count) if count > 1 else ()
    stages = stages_at(work, starts)
    cut = plan_cut(read(traced), traced, plan.tp) if plan.tp > 1 else Cut(Reading(), frozenset(), 1)
    rows = _parameters(template, traced, cut, stages, plan)
    if plan.pp == 1:
        return Explained(str(plan), features_of(plan), tuple(rows))
    described = _stages(work, stages, starts, costs, rows, plan)
    flow = Flow(tuple(stage % plan.pp for stage in range(count)), stages.feeds)
    seconds = tuple(row.forward_seconds for row in described), tuple(row.backward_seconds for row in described)
    step = simulate(build_schedule(plan.schedule, flow, plan.microbatches), Costs(*seconds, (0.5,) * count))
    return Explained(str(plan), features_of(plan), tuple(rows), tuple(described), step)


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


def _stages(
    work: Work, stages: Stages, starts: tuple[int, ...], costs: list[Seconds], rows: list[Row], plan: Plan
) -> list[StageRow]:
    edges = [0, *starts, len(work.nodes)]
    found = []
    for stage in range(stages.count):
        own = work.nodes[edges[stage] : edges[stage + 1]]
        taken = costs[edges[stage] : edges[stage + 1]]
        sends = {
            to: sum(_num_bytes(node) for node in sources[stage])
            for to, sources in enumerate(stages.incoming)
            if stage in sources
        }
        elements = sum(round(row.numel * row.share) for row in rows if stage in row.stages)
        forward, backward = (sum(both[at] for both in taken) for at in (0, 1))
        names = [name for name in map(_module, own) if name]
        first, last = (names[0], names[-1]) if names else ("", "")
        found.append(StageRow(stage, stage % plan.pp, first, last, elements, forward, backward, sends))
    return found


def _module(node: fx.Node) -> str:
    """The module that an operation belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
