"""What a plan makes of a model, said before anything is launched."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from stretto.assemble import build_template, example_of
from stretto.errors import Refused
from stretto.graph.cut import plan_cut, report
from stretto.graph.rules import read
from stretto.graph.trace import trace
from stretto.plan import Plan
from stretto.precision import computing
from stretto.task import Task


@dataclass(frozen=True)
class Row:
    """One parameter.

    Args:
        share: of its elements on the rank that has the most.
        why: how it is cut, or why it is whole.
    """

    name: str
    shape: tuple[int, ...]
    share: float
    why: str

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def explain_layers(task: Task, plan: Plan) -> list[Row]:
    """Of each parameter what ``tp`` leaves on a rank, and why. Builds and traces the model in this process.

    Raises:
        Refused: the plan has no ``tp``, or the model can't be traced.
    """
    if plan.tp == 1:
        raise Refused(f"plan {plan}: explain tells what tp cuts, and this plan cuts no layer; give it tp=2")
    template = build_template(task)
    with computing(task.recipe.precision):
        traced = trace(template.structure.train(), *example_of(task, plan, template, None).call)
    cut = plan_cut(read(traced), traced, plan.tp)
    said = report(cut, traced)
    nodes = {traced.parameters.get(node.name): node for node in traced.graph.graph.nodes}
    rows = []
    for name, spec in template.specs.items():
        dims = cut.reading.of(nodes[name])
        most = max(math.prod(cut.part(dims, rank).shape) for rank in range(plan.tp))
        rows.append(Row(name, spec.shape, most / spec.numel if spec.numel else 1.0, said[name]))
    return rows
