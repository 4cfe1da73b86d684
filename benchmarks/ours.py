"""The arm that every benchmark of steps has: a step of stretto's engine, as a run makes it."""

from __future__ import annotations

from stretto.assemble import assemble, build_template
from stretto.comm.group import Group
from stretto.data import Feeder, Position, Sampler
from stretto.graph.assignment import Assignment
from stretto.machinery import Machinery
from stretto.observe import Lanes
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task


class Ours:
    """A step of stretto's engine, as a run makes it."""

    def __init__(self, task: Task, plan: str, group: Group, cut: Assignment | None = None) -> None:
        parsed = Plan.parse(plan)
        dataset = task.data()["train"]
        self.on: Machinery = assemble(
            task, parsed, build_template(task), group, dataset=dataset, assignment=cut
        )
        feeder = Feeder(dataset, task.collate, task.recipe.seed)
        self.stepper = Stepper(task, parsed, feeder, self.on)
        self.batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())
        self.plan = parsed

    def __call__(self) -> float:
        """The loss."""
        return self.stepper.step(next(self.batches)).loss

    @property
    def lanes(self) -> Lanes:
        """What the rank noted."""
        return self.stepper.lanes
