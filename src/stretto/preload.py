"""Which modules a fork server imports beforehand. Needs no torch, so that a launcher can ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from stretto.plan import Plan

# torch's optimizers import torch._dynamo at their first use: 2.5 s in each worker, unless it is there already.
_ALWAYS: Final = ("torch.distributed", "torch._dynamo", "stretto.training", "stretto.parallel.whole")
_BY_ZERO: Final[Mapping[int, tuple[str, ...]]] = MappingProxyType(
    {
        3: (
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "stretto.parallel.sharded",
        )
    }
)


BY_TRACE: Final = ("torch.export._trace", "networkx", "stretto.parallel.divided")


# Between them these need all that any plan does.
ANY_PLAN: Final = (Plan(dp=2, zero=3), Plan(tp=2))


def preloads_of(plans: Iterable[Plan] = ANY_PLAN) -> tuple[str, ...]:
    """What any of these needs."""
    return tuple(dict.fromkeys(name for plan in plans for name in preloads(plan)))


def preloads(plan: Plan | None) -> tuple[str, ...]:
    """Modules that the workers of ``plan`` need, so that they start at once; None: a plan that isn't known yet."""
    if plan is None:
        return _ALWAYS
    return (*_ALWAYS, *_BY_ZERO.get(plan.zero, ()), *(BY_TRACE if plan.traced else ()))
