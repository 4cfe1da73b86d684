"""From a task and a plan to the machinery of one membership epoch. First build, resume and recovery go this one way."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import torch

from stretto.checkpoint import Checkpoint
from stretto.comm.group import Group
from stretto.data import Feeder, Generators, check_lengths, lengths_of, open_feeders, seed_everything, to_device
from stretto.errors import CheckpointError, ProbeFailed, Refused, TaskError
from stretto.graph.assignment import Assignment
from stretto.graph.trace import Scoring
from stretto.launch.process import aside
from stretto.machinery import Machinery, widened
from stretto.observe import free_bytes
from stretto.parallel import BoundOptimizer, Example, Manner, Roots, Template, apply
from stretto.parallel.faithful import roots_of
from stretto.parallel.scored import unseen
from stretto.parallel.template import refuse_overlaps
from stretto.plan import Plan
from stretto.precision import COMPUTE, cast_model, computing, retyped
from stretto.probes import Findings, optimizer_reach, refusal
from stretto.state import Box, StateSource
from stretto.state.digest import format_digest, partial_digest
from stretto.sync import build_sync
from stretto.task import Task

T = TypeVar("T")
HOST: Final = torch.device("cpu")
FREE_SHARE: Final = 1 / 4  # of the free memory that whole gradients may take


def build_template(task: Task) -> Template:
    """Builds the model for real, every generator seeded from the recipe, in the type that it trains in.

    The global generators are left as they were. Needs no group; done once a host where workers are forked afterwards.
    """
    before = Generators.remember()
    seed_everything(task.recipe.seed)
    try:
        module = task.model()
        refuse_overlaps(module)  # a cast would part them
        changed = retyped(module, task.recipe.precision)
        return Template(cast_model(module, task.recipe.precision), changed, task.layout())
    finally:
        before.restore()


def retyped_notes(template: Template, precision: str) -> list[str]:
    """Sentences about what the precision makes of the model's own types."""
    return [
        f"model() made {name!r} (and perhaps more) in {dtype}; precision={precision} trains it in "
        f"{template.specs[name].dtype}, as it does every parameter"
        for dtype, name in template.retyped.items()
    ]


def check_same_model(template: Template, group: Group) -> None:
    """For processes that each built the model themselves. Every rank must call it.

    Raises:
        TaskError: a rank built another one, by a weight, a buffer or a shape.
    """
    initial = template.initial
    found = {}
    for name in initial.names():
        spec = initial.spec(name)
        box = Box.whole(spec.shape)
        found[name] = format_digest(spec, partial_digest(initial.read(name, box), box, spec.shape))
    for rank, theirs in enumerate(group.gather_json(found)):
        apart = [name for name in {**found, **theirs} if found.get(name) != theirs.get(name)]
        if apart:
            what = f"task: model() built another {apart[0].removeprefix('model/')!r} on rank {rank} than on rank"
            raise TaskError(
                f"{what} {group.rank} ({len(apart)} of {len(found)} tensors differ). Here each process builds its own: "
                "let model() load a file, or draw from the seeded generators of torch, numpy and Python"
            )


def needs_whole_tensors(task: Task, plan: Plan, forced: bool = False) -> bool:
    """Whether the task's optimizer looks at whole tensors, for a plan that cuts its state.

    It takes optimizer steps, which may touch an accelerator: for workers only, never for a process that forks.

    Raises:
        Refused: it looks further than ``plan`` leaves it, and the user has not ``forced`` the plan.
    """
    if (plan.zero == 0 or plan.dp == 1) and not plan.traced:
        return False
    try:
        reach = optimizer_reach(task.optimizer)
    except ProbeFailed:  # a factory that wants the real model's parameters; verify can still tell
        return False
    why = refusal(Findings(reach=reach.kind, reach_error=reach.error), plan)
    if why is not None and not forced:
        raise Refused(why)
    return reach.kind != "element"


def assemble(
    task: Task,
    plan: Plan,
    template: Template,
    group: Group,
    source: StateSource | None = None,
    forced: bool = False,
    dataset: Any = None,
    assignment: Assignment | None = None,
) -> Machinery:
    """Lays the template out over ``group`` and fills it from ``source`` (default: the template's first values).

    Every rank of the group must call it. Optimizer state is not read here: :meth:`BoundOptimizer.import_state` does.
    ``dataset`` gives samples for an example, where the plan wants the model traced; by default the task's own.
    ``assignment``: the stages, for the same ones as another machinery had; by default that is measured.
    ``forced``: the user trains on knowing that the plan changes the numbers.
    """
    whole_tensors = needs_whole_tensors(task, plan, forced)
    compute = COMPUTE[task.recipe.precision]
    narrow = compute.itemsize < 4
    once, why = _may_reduce_once(template, plan, group)
    example = example_of(task, plan, template, dataset, group.device) if plan.traced else None
    surround = partial(computing, task.recipe.precision, group.device.type)
    lower = compute if narrow else torch.float32
    manner = Manner(lower, whole_tensors, once, plan.recompute, plan.offload, surround, example, assignment)
    applied = apply(template, plan, group, manner)
    applied.import_state(template.initial if source is None else source)
    optimizer = BoundOptimizer(task.optimizer, template, applied)
    return Machinery(
        group=group,
        applied=applied,
        sync=build_sync(task.recipe.sync, applied, keep=applied.reduces_once),
        optimizer=optimizer,
        schedule=task.schedule(optimizer.optimizer),
        notes=(*applied.notes, *_said(plan, once, applied.reduces_once, why)),
    )


def example_of(
    task: Task, plan: Plan, template: Template, dataset: Any, device: torch.device = HOST
) -> Example:
    """A microbatch of as many samples as a rank mostly has, on ``device``, where the model is traced."""
    data = load_data(task)["train"] if dataset is None else dataset
    count = max(1, min(task.recipe.batch // (plan.dp * plan.microbatches), len(data)))
    before = Generators.remember()
    try:
        samples = to_device(task.collate([data[index] for index in range(count)]), device)
        arguments, keywords = task.inputs(samples, template.structure.forward)
    finally:
        before.restore()
    dtype = COMPUTE[task.recipe.precision]

    def terms(output: Any, batch: Any) -> Any:
        return task.losses(widened(task, output), batch)

    def loss(output: Any) -> Roots:
        return roots_of(terms(output, samples))

    call = to_device(arguments, device, dtype), to_device(keywords, device, dtype)
    why, surround = unseen(samples), partial(computing, task.recipe.precision, device.type)
    return Example(call, loss, None if why else Scoring(terms, samples), why, surround, partial(aside_on, device))


def aside_on(device: torch.device, body: Callable[[], T]) -> T:
    """What ``body`` returns, which must be JSON, so that none of its memory stays in a worker on ``device``; an
    accelerator's state doesn't survive the fork that this takes, so that there it does."""
    return aside(body) if device.type == HOST.type else body()


def _may_reduce_once(template: Template, plan: Plan, group: Group) -> tuple[bool, str]:
    """Whether the gradients of a step's microbatches may be added up whole on each rank and reduced once; why not.

    It saves messages and costs the memory of a whole gradient: worth it up to a quarter of what is free.
    """
    if plan.zero < 2 or plan.microbatches == 1:
        return plan.zero < 2, ""
    whole = sum(spec.num_bytes for name, spec in template.specs.items() if template.trainable[name])
    here = free_bytes(group.device)
    free = -group.maximum(-(math.inf if here is None else here / group.size))
    fits = whole <= free * FREE_SHARE
    return fits, "" if fits else f"whole ones need {whole / 1e6:,.0f} MB, a worker has {free / 1e6:,.0f} MB free"


def _said(plan: Plan, may: bool, once: bool, why: str) -> tuple[str, ...]:
    """A sentence on how often gradients are reduced, where there is a choice."""
    if plan.zero < 2 or plan.microbatches == 1:
        return ()
    if may and not once:
        why = "FSDP2 can't keep those of copies that only some microbatches use"
    how = "added up whole on each worker and sent once a step" if once else f"sent after each one ({why})"
    return (f"the gradients of {plan.microbatches} microbatches are {how}",)


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


def open_data(task: Task, plan: Plan, group: Group) -> dict[str, Feeder]:
    """What feeds this rank, by split; loaders are forked here, before the model is laid out. Every rank must call it.

    Raises:
        TaskError: a split is empty, or has another length on another rank.
    """
    datasets = load_data(task)
    check_lengths(group.gather_json(lengths_of(datasets)))
    return open_feeders(datasets, task.collate, task.recipe.seed, plan.loaders)


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
