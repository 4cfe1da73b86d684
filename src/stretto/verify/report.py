"""What a verification found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "refused"]
What = Literal["ids", "initial weights", "loss", "gradient", "norm", "weight", "state"]


@dataclass(frozen=True)
class Divergence:
    """The first thing in which a plan and one device differ.

    Args:
        step: counted from 1; 0 is before the first.
        what: which kind of thing; within a step they are looked at in the order of :data:`What`.
        name: the tensor, module or sample.
        rank: where it differs, the most if in several places; None where it isn't one rank's.
        by: how much: relative to the largest of its kind on one device; for ``ids`` the number of samples.
        likely: one sentence on what is probably missing.
    """

    step: int
    what: What
    name: str
    rank: int | None
    by: float
    likely: str

    def __str__(self) -> str:
        named = "" if self.name in ("", self.what) else f" ({self.name})"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"step {self.step}: {self.what}{named}{where} is off by {self.by:.3g}: {self.likely}"


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """One plan against one device.

    Args:
        plan: as asked for.
        status: ``refused`` where the plan would change this task's numbers or can't be compared.
        reason: why it is refused or how it failed; None where it passed.
        steps: steps compared.
        loss_max_rel: largest relative difference of the loss over the steps; None where nothing was compared.
        grad_max_rel: of the gradients: largest difference over the largest magnitude on one device.
        grad_norm_max_rel: of the gradient norm before clipping.
        weight_max_rel: of weights and buffers, after the initial build and after every step.
        state_max_rel: of the optimizer's state, each key of it measured by itself.
        left_out: elements left out of the comparison of weights and state, by parameter.
        first_divergence: where a failed plan parted from one device, if it ran to the end.
    """

    plan: str
    status: Status
    reason: str | None = None
    steps: int = 0
    loss_max_rel: float | None = None
    grad_max_rel: float | None = None
    grad_norm_max_rel: float | None = None
    weight_max_rel: float | None = None
    state_max_rel: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    first_divergence: Divergence | None = None


@dataclass(frozen=True)
class VerifyReport:
    """All plans of one verification, in the order asked for.

    Args:
        dtype: ``float64`` or ``float32``: the type that was computed in.
    """

    dtype: str
    plans: tuple[PlanReport, ...]

    @property
    def passed(self) -> bool:
        """No plan failed; a refused one is none that failed."""
        return all(plan.status != "failed" for plan in self.plans)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        plans = [{**asdict(plan), "left_out": dict(plan.left_out)} for plan in self.plans]
        return {"passed": self.passed, "dtype": self.dtype, "plans": plans}
