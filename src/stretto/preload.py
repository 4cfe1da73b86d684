"""Which modules a fork server imports beforehand. Needs no torch, so that a launcher can ask."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stretto.plan import Plan

# torch._dynamo: making any optimizer loads it, which takes each worker two seconds.
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


def preloads(plan: Plan | None) -> tuple[str, ...]:
    """Modules that the workers of ``plan`` need, so that they start at once; None: a plan that isn't known yet."""
    return _ALWAYS if plan is None else (*_ALWAYS, *_BY_ZERO.get(plan.zero, ()))
