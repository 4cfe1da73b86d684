"""Plans as text, as ``--plan`` takes them, and as setups that a planner judges."""

from __future__ import annotations

import re

import numpy as np

from stretto.errors import PlanError
from stretto.plan import Plan
from stretto.planner.setups import SCHEDULES, Setups
from stretto.planner.space import Space


def plan_of(setups: Setups, at: int) -> str:
    """The plan at a place, written as plans are; ``cp`` stands at the end, for :class:`Plan` doesn't know it yet."""
    one = {name: values[at].item() for name, values in vars(setups).items()}
    pp, chunks, cp = int(one["pp"]), int(one["chunks"]), int(one["cp"])
    plan = Plan(
        dp=int(one["dp"]),
        zero=int(one["zero"]),
        microbatches=int(one["microbatches"]),
        dp_shard=int(one["shard"]) if one["zero"] == 3 else 0,
        tp=int(one["tp"]),
        sequence=one["parallel_sequence"],
        pp=pp,
        schedule=SCHEDULES[int(one["schedule"])] if pp > 1 else "",
        chunks=chunks if chunks > 1 else 0,
        recompute="full" if one["full"] else "selective" if one["selective"] else "none",
        offload="optimizer" if one["offload"] else "none",
    )
    return f"{plan},cp={cp}" if cp > 1 else str(plan)


def setups_of(text: str, space: Space) -> Setups:
    """The setups, one of them, that a plan's text says; it may be one that a search wouldn't look at.

    Raises:
        PlanError: it is no plan, needs another number of devices, or can't cut this model or this batch so.
    """
    cp, rest = _cp(text)
    plan, model, count = Plan.parse(rest), space.described.model, space.machines.count
    if plan.world_size * cp != count:
        said = f"plan {text} needs {plan.world_size * cp} device(s), and the cluster has {count}"
        raise PlanError(f"{said}; give another dp")
    if plan.branch > 1 or plan.offload in ("activations", "all"):
        said = "branch" if plan.branch > 1 else f"offload={plan.offload}"
        raise PlanError(f"plan {text}: {said} isn't predicted for a model that is only described; leave it out")
    if plan.pp > model.layers:
        raise PlanError(f"plan {text}: pp={plan.pp} is over the model's {model.layers} layers; give at most so many")
    for name, value in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if value % plan.tp:
            raise PlanError(f"plan {text}: tp={plan.tp} doesn't divide {name}={value}; give a divisor")
    if cp > 1 and space.described.sequence % (2 * cp):
        said = f"2 x cp={2 * cp} must divide the sequence of {space.described.sequence}"
        raise PlanError(f"plan {text}: {said}; give another cp")
    own = -(-space.batch // plan.dp)
    if plan.dp > space.batch or plan.microbatches > own:
        said = f"dp={plan.dp} with microbatches={plan.microbatches} needs a batch of {plan.dp * plan.microbatches}"
        raise PlanError(f"plan {text}: {said}, got {space.batch}; give fewer microbatches or a larger --batch")
    values = {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": cp,
        "chunks": max(1, plan.chunks),
        "zero": plan.zero,
        "shard": plan.dp_shard if plan.zero == 3 else plan.dp,
        "micro": -(-own // plan.microbatches),
        "microbatches": plan.microbatches,
        "schedule": SCHEDULES.index(plan.schedule or "1f1b"),
    }
    flags = {
        "parallel_sequence": plan.sequence,
        "full": plan.recompute == "full",
        "selective": plan.recompute == "selective",
        "offload": plan.offload == "optimizer",
    }
    columns = {name: np.array([value], float) for name, value in values.items()}
    return space.setups({**columns, **{name: np.array([value]) for name, value in flags.items()}})


def _cp(text: str) -> tuple[int, str]:
    """The degree of ``cp``, and the text without it."""
    found = re.findall(r"(?:^|,)\s*cp\s*=\s*([^,\s]*)\s*(?=,|$)", text)
    if not found:
        return 1, text
    if len(found) > 1 or not found[0].isdigit() or int(found[0]) < 1:
        raise PlanError(f"plan: cp needs one whole number of at least 1, as in cp=2; got {text!r}")
    return int(found[0]), ",".join(piece for piece in text.split(",") if piece.partition("=")[0].strip() != "cp")
