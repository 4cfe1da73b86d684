"""From a task and a plan to the machinery of one membership epoch. First build, resume and recovery go this one way."""

from __future__ import annotations

from typing import Any

from stretto.checkpoint import Checkpoint
from stretto.comm.group import Group
from stretto.data import Generators, seed_everything
from stretto.errors import CheckpointError, ProbeFailed, Refused
from stretto.machinery import Machinery
from stretto.parallel import BoundOptimizer, Template, apply
from stretto.plan import Plan
from stretto.precision import cast_model
from stretto.probes import optimizer_cut_error
from stretto.state import StateSource
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


def check_optimizer(task: Task, plan: Plan) -> None:
    """Raises Refused where ``plan`` cuts parameters and the task's optimizer looks at whole ones.

    It takes optimizer steps, which may touch an accelerator: for workers only, never for a process that forks.
    """
    if plan.mesh.degree("dp_shard") == 1:
        return
    try:
        error = optimizer_cut_error(task.optimizer)
    except ProbeFailed:  # a factory that wants the real model's parameters; verify can still tell
        return
    if error > 1e-12:
        raise Refused(
            f"plan {plan}: optimizer() looks at whole tensors: a parameter's update differs from its halves' by "
            f"{error:.0e} of the change, so sharding would change the numbers. Use zero=0, or an optimizer that works "
            f"element by element (SGD, Adam, AdamW, RMSprop, ...)"
        )


def assemble(
    task: Task,
    plan: Plan,
    template: Template,
    group: Group,
    source: StateSource | None = None,
    forced: bool = False,
) -> Machinery:
    """Lays the template out over ``group`` and fills it from ``source`` (default: the template's first values).

    Every rank of the group must call it. Optimizer state is not read here: :meth:`BoundOptimizer.import_state` does.
    ``forced``: the user trains on knowing that the plan changes the numbers.
    """
    if not forced:
        check_optimizer(task, plan)
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


def load_data(task: Task) -> dict[str, Any]:
    """The datasets, built under the recipe's seed so that every worker's are the same."""
    before = Generators.remember()
    seed_everything(task.recipe.seed)
    try:
        return task.data()
    finally:
        before.restore()


def fitting(template: Template, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint, once its tensors are known to be the model's. Raises CheckpointError naming one that isn't."""
    if checkpoint is None:
        return None
    names = set(checkpoint.names())
    for name, spec in template.specs.items():
        full = f"model/{name}"
        if full not in names:
            raise CheckpointError(
                f"checkpoint {checkpoint.step}: the model's {name!r} is not in it; did the task change?"
            )
        saved = checkpoint.spec(full)
        if (saved.shape, saved.dtype) != (spec.shape, spec.dtype):
            raise CheckpointError(
                f"checkpoint {checkpoint.step}: {name!r} is {saved.dtype} {list(saved.shape)} in it, "
                f"the model's is {spec.dtype} {list(spec.shape)}; did the task or its settings change?"
            )
    return checkpoint
