"""What the probes found, as plain JSON, and what it means for a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is true of a task under any plan; the empty text means that nothing was found.

    Args:
        broken: why no cut of a batch keeps the numbers: the function, what differed, by how much, what to do.
        buffer: a buffer that forward changes, in another way for each piece of the batch.
        counter: a buffer that each forward changes, and in the same way whatever it is given.
        written: a parameter that forward changes.
        layers: an element of the model's lists that is called for some samples and not for others.
        reach: ``element``, ``tensor`` or ``all``, see :class:`Reach`; empty where the optimizer could not be probed.
        reach_error: by how much its updates of parts differed.
        notes: what could not be compared, for people.
    """

    broken: str = ""
    buffer: str = ""
    counter: str = ""
    written: str = ""
    layers: str = ""
    reach: str = ""
    reach_error: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Findings:
        """The inverse of :meth:`to_json`. Raises ValueError for anything else."""
        blank = cls().to_json()
        fits = record.keys() == blank.keys() and all(type(record[key]) is type(blank[key]) for key in blank)
        if not fits or not all(isinstance(note, str) for note in record["notes"]):
            raise ValueError("no findings of this version")
        return cls(**{**record, "notes": tuple(record["notes"])})


def pieces_of(plan: Plan) -> int:
    """Into how many pieces the plan cuts a global batch."""
    return plan.dp * plan.microbatches


def refusal(findings: Findings, plan: Plan) -> str | None:
    """Why ``plan`` would change the numbers of the task, or never end, and the way out, in one line; or None."""
    tests = (deadlock, _of_cut, _of_writing, _of_optimizer)
    return next(filter(None, (test(findings, plan) for test in tests)), None)


def deadlock(findings: Findings, plan: Plan) -> str | None:
    """Why ranks under ``plan`` would wait for each other for ever, or None."""
    if not findings.layers or plan.zero != 3 or plan.mesh.degree("dp_shard") == 1:
        return None
    return (
        f"plan {plan}: model(): the layer {findings.layers} runs for some samples and not for others; zero=3 gathers "
        "layers by all ranks together, so ranks with other samples would wait for ever; use zero=2 or less"
    )


def _of_cut(findings: Findings, plan: Plan) -> str | None:
    if pieces_of(plan) == 1:
        return None
    if findings.broken:
        return f"plan {plan} cuts each batch into {pieces_of(plan)} pieces, but {findings.broken}"
    if findings.buffer:
        return (
            f"plan {plan}: model(): forward changes the buffer {findings.buffer}, in another way for each piece of a "
            f"batch, so {pieces_of(plan)} pieces would give another buffer than one device's; use "
            "dp=1,microbatches=1, or a normalisation that keeps nothing between batches"
        )
    if findings.counter and plan.microbatches > 1:
        return (
            f"plan {plan}: model(): each forward changes the buffer {findings.counter}, and with microbatches a step "
            f"has {plan.microbatches} forwards where one device has one; use microbatches=1"
        )
    return None


def _of_writing(findings: Findings, plan: Plan) -> str | None:
    if not findings.written or plan.zero != 3 or plan.mesh.degree("dp_shard") == 1:
        return None
    return (
        f"plan {plan}: model(): forward changes the parameter {findings.written}, of which zero=3 has one copy for all "
        "ranks: each would change what the others are reading; compute from it what forward needs, or use zero=0"
    )


def _of_optimizer(findings: Findings, plan: Plan) -> str | None:
    cuts_tensors = plan.zero == 3 and plan.mesh.degree("dp_shard") > 1
    if findings.reach in ("tensor", "all") and plan.tp > 1:
        return (
            f"plan {plan}: optimizer() looks at whole tensors: a parameter's update differs from its parts' by "
            f"{findings.reach_error:.0e} of the change, so tp={plan.tp}, which cuts them, would change the numbers; "
            "use tp=1, or an optimizer that works element by element (SGD, Adam, AdamW, RMSprop, ...)"
        )
    if findings.reach == "all" and ((plan.zero and plan.dp > 1) or plan.line > 1):
        spreads = [key for key in ("pp", "branch") if getattr(plan, key) > 1]
        instead = ",".join(f"{key}=1" for key in spreads) or "zero=0"
        return (
            f"plan {plan}: optimizer() computes a parameter's update from other parameters too: beside another one it "
            f"differs by {findings.reach_error:.0e} of the change, so spreading them over ranks would change the "
            f"numbers; use {instead}, or an optimizer that works element by element (SGD, Adam, AdamW, RMSprop, ...)"
        )
    if findings.reach == "tensor" and cuts_tensors:
        return (
            f"plan {plan}: optimizer() looks at whole tensors: a parameter's update differs from its halves' by "
            f"{findings.reach_error:.0e} of the change, so sharding would change the numbers; use zero=2 or less, "
            "where each tensor has one owner, or an optimizer that works element by element (SGD, Adam, AdamW, ...)"
        )
    return None
