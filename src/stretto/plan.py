"""Plan: where a task runs. A plan never changes the numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

from stretto.errors import PlanError, Refused, nearest
from stretto.mesh import Mesh

LATER_KEYS: Final = (
    "tp",
    "pp",
    "cp",
    "ep",
    "branch",
    "dp_replicate",
    "dp_shard",
    "schedule",
    "recompute",
    "offload",
)
ZERO_STAGES: Final = (0, 3)
LATER_ZERO_STAGES: Final = (1, 2)


@dataclass(frozen=True)
class Plan:
    """The degree of each mesh axis and how a rank does its share.

    Args:
        dp: ranks that share the global batch.
        zero: 0 keeps weights, gradients and optimizer state whole on every rank; 3 shards all of them over ``dp``.
        microbatches: pieces in which a rank takes its share of a batch, one after the other.
        loaders: processes of each rank that fetch and collate samples ahead of it; 0: the rank does so itself. Plans
            that differ in nothing else are equal.
    """

    dp: int = 1
    zero: int = 0
    microbatches: int = 1
    loaders: int = field(default=0, compare=False)  # they never change a number

    def __post_init__(self) -> None:
        """Raises PlanError for a value that means nothing, Refused for one that isn't built yet."""
        for name, least in (("dp", 1), ("zero", 0), ("microbatches", 1), ("loaders", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PlanError(f"plan: {name} must be a whole number of at least {least}, got {value!r}")
        if self.zero in LATER_ZERO_STAGES:
            raise Refused(f"plan: zero={self.zero} is not built yet; use zero=0 or zero=3")
        if self.zero not in ZERO_STAGES:
            raise PlanError(f"plan: zero must be 0 or 3, got {self.zero}")

    @classmethod
    def parse(cls, text: str, workers: int | None = None) -> Plan:
        """Reads ``dp=2,zero=3``; what isn't named is 1 (or 0), ``dp`` is ``workers`` where only those are given.

        Raises:
            PlanError: a misspelt key (the nearest is offered), a value that is no number, a key given twice,
                or a world size other than ``workers``.
        """
        given: dict[str, int] = {}
        valid = tuple(each.name for each in dataclasses.fields(cls))
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in LATER_KEYS:
                raise Refused(f"plan: {key} is planned but not built yet; use {', '.join(valid)}")
            if key not in valid:
                raise PlanError(f"plan: unknown key {key!r}; valid: {', '.join(valid)}{nearest(key, valid)}")
            if not equals or not value.isdigit():
                raise PlanError(f"plan: {key} needs a whole number, as in {key}=2; got {part!r}")
            if key in given:
                raise PlanError(f"plan: {key} is given twice")
            given[key] = int(value)
        if workers is not None and "dp" not in given:
            given["dp"] = workers
        plan = cls(**given)
        plan.check_workers(workers)
        return plan

    def check_workers(self, workers: int | None) -> None:
        """Raises PlanError unless ``workers`` (where given) is the number of ranks this plan needs."""
        if workers is not None and workers != self.world_size:
            raise PlanError(
                f"plan {self} needs {self.world_size} worker(s), got --workers {workers}; "
                f"leave --workers out, or give dp={workers}"
            )

    @property
    def world_size(self) -> int:
        """Ranks that this plan needs."""
        return self.dp

    @property
    def mesh(self) -> Mesh:
        """The device mesh, outermost axis first."""
        sharded = self.zero == 3
        return Mesh((("dp_replicate", 1 if sharded else self.dp), ("dp_shard", self.dp if sharded else 1)))

    def __str__(self) -> str:
        parts = [f"dp={self.dp}"]
        parts += [f"zero={self.zero}"] if self.zero else []
        parts += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        parts += [f"loaders={self.loaders}"] if self.loaders else []
        return ",".join(parts)
