"""From a task and a plan to the machinery of one membership epoch. First build, resume and recovery go this one way."""

from __future__ import annotations

from stretto.comm.group import Group
from stretto.data import Generators, seed_everything
from stretto.parallel import BoundOptimizer, Template, apply
from stretto.plan import Plan
from stretto.precision import cast_model
from stretto.state import StateSource
from stretto.step import Machinery
from stretto.sync import build_sync
from stretto.task import Task


def build_template(task: Task) -> Template:
    """Builds the model for real, every generator seeded from the recipe, in the type that it trains in.

    The global generators are left as they were. Needs no group; done once a host where workers are forked afterwards.
    """
    before = Generators.remember()
    seed_everything(task.recipe.seed)
    try:
        return Template(cast_model(task.model(), task.recipe.precision))
    finally:
        before.restore()


def assemble(task: Task, plan: Plan, template: Template, group: Group, source: StateSource | None = None) -> Machinery:
    """Lays the template out over ``group`` and fills it from ``source`` (default: the template's first values).

    Every rank of the group must call it. Optimizer state is not read here: :meth:`BoundOptimizer.import_state` does.
    """
    applied = apply(template, plan, group)
    applied.import_state(template.initial if source is None else source)
    optimizer = BoundOptimizer(task.optimizer, template, applied, group.device)
    return Machinery(
        group=group,
        applied=applied,
        sync=build_sync(task.recipe.sync, applied, group),
        optimizer=optimizer,
        schedule=task.schedule(optimizer.optimizer),
    )


def disassemble(machinery: Machinery) -> None:
    """Lets go of everything but the template; the group is closed. The process can assemble again at once."""
    machinery.sync.detach()
    machinery.applied.teardown()
    machinery.group.close()
