"""Choosing the layout of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from torch import nn

from stretto.comm.group import SHARED_MEMORY, Group
from stretto.comm.shm_memory import Unavailable
from stretto.errors import Refused
from stretto.parallel._base import Applied, Copies, Manner, Ranks
from stretto.parallel.batchnorm import batch_norms
from stretto.parallel.flats import without_one_copy
from stretto.parallel.template import Template
from stretto.plan import Plan

LINE: Final = ("branch", "pp")  # the axes over which the model's stages lie


def _whole(template: Template, ranks: Ranks, manner: Manner) -> Applied:
    from stretto.parallel.whole import Whole

    return Whole(template, ranks, manner, dealt=False)


def _dealt(template: Template, ranks: Ranks, manner: Manner) -> Applied:
    from stretto.parallel.whole import Whole

    return Whole(template, ranks, manner, dealt=True)


def _sharded(template: Template, ranks: Ranks, manner: Manner) -> Applied:
    from stretto.parallel.sharded import Sharded
    from stretto.parallel.whole import Whole

    why = ""
    if ranks.replicas.size == 1:
        try:
            return Whole(template, ranks, manner, dealt=True, one_copy=True)
        except Unavailable as error:  # on all ranks alike: several hosts, an accelerator, no memory to share
            why = str(error)
    sharded = Sharded(template, ranks, manner)
    if why and ranks.everyone.transport == SHARED_MEMORY:
        sharded.notes = (*sharded.notes, without_one_copy(why, "layer after layer (FSDP2)"))
    return sharded


def _divided(template: Template, plan: Plan, ranks: Ranks, manner: Manner) -> Applied:
    from stretto.parallel.divided import Divided

    return Divided(template, plan, ranks, manner)


_LAYOUTS: Final[Mapping[int, Callable[[Template, Ranks, Manner], Applied]]] = MappingProxyType(
    {0: _whole, 1: _dealt, 2: _dealt, 3: _sharded}
)


def check(template: Template, plan: Plan) -> None:
    """Raises Refused, by name, where ``plan`` would change the numbers of this model."""
    norms = batch_norms(template.structure)
    if norms and plan.microbatches > 1:
        raise Refused(
            f"plan {plan}: {norms[0]} is a BatchNorm, whose statistics are of the whole batch; with microbatches they "
            f"would be of pieces. Use microbatches=1, or replace it by GroupNorm"
        )
    if plan.dp * plan.microbatches > 1:
        _check_tables(template, plan)


def _check_tables(template: Template, plan: Plan) -> None:
    """Raises Refused for an embedding that looks at the whole batch where no loss shows it."""
    for name, table in template.structure.named_modules():
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
            continue
        if table.max_norm is not None:
            raise Refused(
                f"plan {plan}: {name} has max_norm, so forward shortens the rows that a piece of the batch reads, in "
                "place, and ranks would train different tables. Use dp=1, or normalise what the table returns"
            )
        if table.scale_grad_by_freq:
            raise Refused(
                f"plan {plan}: {name} has scale_grad_by_freq, whose frequencies are of the whole batch; of its pieces "
                "they would be others. Use dp=1, or weigh the samples in loss()"
            )


def apply(template: Template, plan: Plan, group: Group, manner: Manner | None = None) -> Applied:
    """Lays ``template`` out over ``group``; its tensors are allocated, and filled by ``import_state``.

    Every rank of the group must call it.

    Raises:
        Refused: the plan would change this model's numbers.
    """
    check(template, plan)
    mesh, samples = plan.mesh, ("dp_replicate", "dp_shard")
    tensor, replicas = group.along(mesh, "tp"), group.along(mesh, "dp_replicate")
    alike = replicas if tensor.size == 1 else tensor
    if plan.zero == 3 and tensor.size > 1 < replicas.size:
        alike = group.along(mesh, "dp_replicate", "tp")
    ranks = Ranks(
        everyone=group,
        world=group.along(mesh, *samples),
        copies=Copies(group.along(mesh, "dp_shard"), replicas, alike),
        tensor=tensor,
        stage=group.along(mesh, *samples, "tp"),
        line=group.line(mesh, *LINE),
        holders=lambda ranks: (
            group.holders(mesh, LINE, ranks, *samples),
            group.holders(mesh, LINE, ranks, *samples, "tp"),
        ),
    )
    if plan.traced:
        return _divided(template, plan, ranks, manner or Manner())
    return _LAYOUTS[plan.zero](template, ranks, manner or Manner())
