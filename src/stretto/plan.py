"""Plan: where a task runs. A plan never changes the numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from stretto.errors import PlanError, Refused, nearest
from stretto.mesh import Mesh

LATER_KEYS: Final = ("cp", "ep")
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ZERO_STAGES: Final = (0, 1, 2, 3)
RECOMPUTE: Final = ("none", "selective", "full")
OFFLOAD: Final = ("none", "optimizer", "activations", "all")
_TRUTHS: Final = MappingProxyType({"true": True, "false": False})
_LEAST: Final = MappingProxyType(
    {"dp": 1, "zero": 0, "microbatches": 1, "dp_shard": 0, "tp": 1, "pp": 1, "branch": 1, "chunks": 0, "loaders": 0}
)


@dataclass(frozen=True)
class Plan:
    """The degree of each mesh axis and how a rank does its share.

    Args:
        dp: ranks that share the global batch.
        zero: what is cut over ``dp`` (ZeRO, arXiv 1910.02054): 0 nothing, 1 the optimizer's state, 2 the gradients too,
            3 the weights too.
        microbatches: pieces in which a rank takes its share of a batch, one after the other.
        dp_shard: ranks that cut one copy of the weights between them, a divisor of ``dp``; with ``zero=3``. By default
            all of ``dp``. Where it is fewer, ``dp_replicate = dp / dp_shard`` such copies train side by side (hybrid
            sharding, arXiv 2304.11277, section 3.2.2).
        tp: ranks that cut the model's layers between them and share each sample (tensor parallelism, arXiv 1909.08053).
        sequence: what lies between the layers that ``tp`` cuts (sums, norms, dropout) is cut along the sequence, for
            less memory (arXiv 2205.05198, section 4.2.2).
        pp: ranks that have the model's layers between them in stages, one after another, and share each sample
            (pipeline parallelism, arXiv 1811.06965).
        branch: ranks that have between them the model's towers, parts that don't depend on each other, and share each
            sample; beside ``pp`` each tower has that many, with its stages on them.
        schedule: in which order the ranks of ``pp`` or ``branch`` run their microbatches forward and backward; empty:
            ``1f1b``.
        chunks: stages on each rank of ``pp``; 0: as many as the schedule wants.
        recompute: which activations are dropped in forward and computed again in backward (arXiv 1604.06174), for less
            memory: ``none``; ``selective``, all but the results of matrix products, convolutions and attention; or
            ``full``, all but what each layer is called with.
        offload: what lies on the host, for less memory on the device (arXiv 2101.06840): ``none``; ``optimizer``, what
            is trained and the optimizer's state; ``activations``, what forward keeps for backward; or ``all`` of it.
        loaders: processes of each rank that fetch and collate samples ahead of it; 0: the rank does so itself. Plans
            that differ in nothing else are equal.
    """

    dp: int = 1
    zero: int = 0
    microbatches: int = 1
    dp_shard: int = 0
    tp: int = 1
    sequence: bool = False
    pp: int = 1
    branch: int = 1
    schedule: str = ""
    chunks: int = 0
    recompute: str = "none"
    offload: str = "none"
    loaders: int = field(default=0, compare=False)  # they never change a number

    def __post_init__(self) -> None:
        """Raises PlanError for a value that means nothing."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PlanError(f"plan: {name} must be a whole number of at least {least}, got {value!r}")
        self._check_stages()
        if not isinstance(self.sequence, bool):
            raise PlanError(f"plan: sequence must be true or false, got {self.sequence!r}")
        if self.sequence and self.tp == 1:
            raise PlanError("plan: sequence=true says what tp cuts beside its layers, and tp=1 cuts none; give tp too")
        if self.recompute not in RECOMPUTE:
            near = nearest(str(self.recompute), RECOMPUTE)
            raise PlanError(f"plan: recompute must be none, selective or full, got {self.recompute!r}{near}")
        if self.offload not in OFFLOAD:
            near = nearest(str(self.offload), OFFLOAD)
            raise PlanError(f"plan: offload must be none, optimizer, activations or all, got {self.offload!r}{near}")
        if self.zero not in ZERO_STAGES:
            raise PlanError(f"plan: zero must be 0, 1, 2 or 3, got {self.zero}")
        if self.zero != 3 and self.dp_shard > 1:
            raise PlanError(f"plan: dp_shard={self.dp_shard} cuts the weights, which is zero=3; got zero={self.zero}")
        if self.dp_shard == 0:
            object.__setattr__(self, "dp_shard", self.dp if self.zero == 3 else 1)
        if self.zero == 3 and self.dp_shard == 1 < self.dp:
            raise PlanError("plan: dp_shard=1 cuts nothing; leave it out, and zero=3 too")
        if self.dp % self.dp_shard:
            raise PlanError(f"plan: dp_shard={self.dp_shard} must divide the {self.dp} data-parallel ranks")

    def _check_stages(self) -> None:
        """Fills in what ``pp`` and ``branch`` leave open."""
        if self.line == 1:
            for key in ("schedule", "chunks"):
                if getattr(self, key):
                    raise PlanError(
                        f"plan: {key} says how stages run, and this plan has none; give pp or branch too, or leave it "
                        "out"
                    )
            return
        object.__setattr__(self, "schedule", self.schedule or "1f1b")
        if self.schedule not in SCHEDULES:
            known, near = ", ".join(SCHEDULES), nearest(self.schedule, SCHEDULES)
            raise PlanError(
                f"plan: schedule must be one of {known}; got {self.schedule!r}{near}"
            )
        if self.pp == 1:
            if self.chunks:
                said = "plan: chunks are stages on each rank of pp; branch alone has towers in their place"
                raise PlanError(f"{said}; leave it out")
            return
        object.__setattr__(self, "chunks", self.chunks or (2 if self.schedule == "interleaved" else 1))
        if self.schedule == "interleaved" and self.chunks == 1:
            raise PlanError("plan: schedule=interleaved deals several stages to each rank; give chunks=2 or more")

    @classmethod
    def parse(cls, text: str, workers: int | None = None) -> Plan:
        """Reads ``dp=2,zero=3`` or ``dp_replicate=2,dp_shard=2``; what isn't named is 1 (or 0), and ``dp`` is
        ``workers`` where only those are given.

        Raises:
            PlanError: a misspelt key (the nearest is offered), a value that is no number, a key given twice,
                or a world size other than ``workers``.
        """
        given: dict[str, Any] = {}
        valid = [field.name for field in dataclasses.fields(cls)]
        valid.insert(valid.index("dp_shard"), "dp_replicate")
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in LATER_KEYS:
                raise Refused(f"plan: {key} is planned but not built yet; use {', '.join(valid)}")
            if key not in valid:
                raise _unknown(key, valid)
            if key in given:
                raise PlanError(f"plan: {key} is given twice")
            if key in ("recompute", "offload", "schedule"):
                given[key] = value
                continue
            if key == "sequence":
                if value not in _TRUTHS:
                    raise PlanError(f"plan: sequence must be true or false, got {part!r}")
                given[key] = _TRUTHS[value]
                continue
            if not equals or not value.isdigit():
                raise PlanError(f"plan: {key} needs a whole number, as in {key}=2; got {part!r}")
            given[key] = int(value)
        _read_axes(given, workers)
        if workers is not None and "dp" not in given:
            share = given.get("tp", 1) * given.get("pp", 1) * given.get("branch", 1)
            given["dp"] = max(1, workers // max(1, share))
        plan = cls(**given)
        plan.check_workers(workers)
        return plan

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Plan:
        """From the values of its fields, as a run's ``resolved.yaml`` keeps them.

        Raises:
            PlanError: a field that plans don't have, or a value that means nothing.
        """
        valid = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in valid:
                raise _unknown(key, valid)
        return cls(**values)

    def check_workers(self, workers: int | None) -> None:
        """Raises PlanError unless ``workers`` (where given) is the number of ranks this plan needs."""
        if workers is not None and workers != self.world_size:
            raise PlanError(
                f"plan {self} needs {self.world_size} worker(s), got --workers {workers}; "
                f"leave --workers out, or give dp={workers}"
            )

    def on(self, workers: int) -> Plan:
        """The same way of training on another number of workers; copies of the weights stay cut alike if they can."""
        pp, branch = self._line_on(workers)
        tp = self.tp if workers // (pp * branch) % self.tp == 0 else 1
        dp = workers // (tp * pp * branch)
        hybrid = 1 < self.dp_shard < self.dp
        keeps = hybrid and dp % self.dp_shard == 0
        shard, sequence = self.dp_shard if keeps else 0, self.sequence and tp > 1
        fewer = dataclasses.replace(self, dp=dp, tp=tp, sequence=sequence, dp_shard=shard)
        if pp > 1:
            return dataclasses.replace(fewer, pp=pp, branch=branch)
        schedule = "" if branch == 1 or (self.pp > 1 and self.schedule == "interleaved") else self.schedule
        return dataclasses.replace(fewer, pp=1, branch=branch, schedule=schedule, chunks=0)

    def _line_on(self, workers: int) -> tuple[int, int]:
        """``pp`` and ``branch`` where so many workers can keep them: both, or the larger, or the other."""
        each = sorted([(self.pp, 1), (1, self.branch)], key=max, reverse=True)
        return next((one for one in ((self.pp, self.branch), *each) if workers % (one[0] * one[1]) == 0), (1, 1))

    @property
    def line(self) -> int:
        """Ranks that have the model's stages between them and share each sample."""
        return self.pp * self.branch

    @property
    def traced(self) -> bool:
        """Whether what runs is the model's traced graph, cut."""
        return self.tp * self.line > 1

    @property
    def world_size(self) -> int:
        """Ranks that this plan needs."""
        return self.dp * self.tp * self.line

    @property
    def dp_replicate(self) -> int:
        """Copies of the weights, each whole or cut over ``dp_shard`` ranks."""
        return self.dp // self.dp_shard

    @property
    def mesh(self) -> Mesh:
        """The device mesh, outermost axis first."""
        samples = (("dp_replicate", self.dp_replicate), ("dp_shard", self.dp_shard))
        return Mesh((("branch", self.branch), ("pp", self.pp), *samples, ("tp", self.tp)))

    def __str__(self) -> str:
        hybrid = 1 < self.dp_shard < self.dp
        parts = [f"dp_replicate={self.dp_replicate}", f"dp_shard={self.dp_shard}"] if hybrid else [f"dp={self.dp}"]
        parts += [f"zero={self.zero}"] if self.zero and not hybrid else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += ["sequence=true"] if self.sequence else []
        parts += [f"pp={self.pp}"] if self.pp > 1 else []
        parts += [f"branch={self.branch}"] if self.branch > 1 else []
        parts += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        parts += [f"schedule={self.schedule}"] if self.schedule not in ("", "1f1b") else []
        parts += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        parts += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        parts += [f"offload={self.offload}"] if self.offload != "none" else []
        parts += [f"loaders={self.loaders}"] if self.loaders else []
        return ",".join(parts)


def _unknown(key: str, valid: Sequence[str]) -> PlanError:
    return PlanError(f"plan: unknown key {key!r}; valid: {', '.join(valid)}{nearest(key, valid)}")


def _read_axes(given: dict[str, Any], workers: int | None) -> None:
    """Turns ``dp_replicate`` and ``dp_shard``, where given, into ``dp``, ``dp_shard`` and ``zero=3``, in place."""
    replicate = given.pop("dp_replicate", None)
    shard = given.get("dp_shard")
    if replicate is None and shard is None:
        return
    if 0 in (replicate, shard):
        raise PlanError("plan: dp_replicate and dp_shard are whole numbers of at least 1")
    total = given.get("dp", workers)
    if replicate is not None and shard is not None:
        if given.get("dp", replicate * shard) != replicate * shard:
            raise PlanError(f"plan: dp={given['dp']} is not dp_replicate={replicate} times dp_shard={shard}")
        given["dp"] = replicate * shard
    elif replicate is not None:
        given["dp"] = total or replicate
        if given["dp"] % replicate:
            raise PlanError(f"plan: dp_replicate={replicate} must divide the {given['dp']} data-parallel ranks")
        given["dp_shard"] = given["dp"] // replicate
    else:
        given["dp"] = total or shard or 1
    if given["dp_shard"] > 1:
        given.setdefault("zero", 3)
