"""Where in a cut model's forward a plan parts from one device, in words. Pure: no torch, no process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.plan import Plan
from stretto.verify.facts import RankFacts, ReferenceRecord, Sighting
from stretto.verify.report import Divergence
from stretto.verify.tolerances import limits_of


def bound_for(found: Divergence, record: ReferenceRecord) -> float:
    """How far a value of forward may be off. Rounding is mostly within a bound's square root, also where values cancel
    in an operation; what moves the loss by less than that is looked for with a narrower one."""
    limit = limits_of(record, found.step).gradient
    return min(math.sqrt(limit), max(found.by / 100, 10 * limit))


def down_to(found: Divergence, ranks: Sequence[RankFacts]) -> Divergence:
    """``found``, of gradients, with how far down backward is right, where that is all but the model's first layers."""
    off: dict[str, bool] = {}
    for facts in (facts for rank in ranks for step in rank.steps if step.step == found.step for facts in step.tensors):
        if facts.kind == "gradient" and (facts.share or facts.differs):
            off[facts.name] = off.get(facts.name, False) or facts.differs
    order = next((names for rank in ranks if (names := _gradients(rank, found.step))), [])
    wrong = [name for name in order if off.get(name)]
    right = [name for name in order if off.get(name) is False]
    if not wrong or not right or order.index(wrong[-1]) > order.index(right[0]):
        return found
    said = f"in the model's order backward is right down to {right[0]}, and off from {wrong[-1]} on"
    return replace(found, likely=f"{found.likely}; {said}")


def _gradients(facts: RankFacts, step: int) -> list[str]:
    """Every parameter's name, in the model's order."""
    return [fact.name for one in facts.steps if one.step == step for fact in one.tensors if fact.kind == "gradient"]


def located(found: Divergence, seen: Mapping[int, Sighting | None], plan: Plan) -> Divergence:
    """``found``, with what each rank saw first in the same step's forward."""
    if len(seen) < plan.world_size:
        said = "where could not be looked at: run a second time, the workers did not come as far"
        return replace(found, likely=f"{found.likely}; {said}")
    off = {rank: sighting for rank, sighting in sorted(seen.items()) if sighting is not None}
    if not off:
        said = "every operation gives on every rank what it gives on one device: look at loss() and the sums of it"
        return replace(found, likely=f"{found.likely}; {said}")
    first = min(off.values(), key=lambda sighting: sighting.order)
    ranks = [rank for rank, sighting in off.items() if sighting.order == first.order]
    where = ", ".join(f"rank {rank} ({plan.mesh.describe(rank)})" for rank in ranks[:4])
    where += "" if len(ranks) <= 4 else f" and {len(ranks) - 4} more"
    module = first.name or "the model itself"
    of = f"{first.operation}, microbatch {first.microbatch + 1}, off by {first.by:.3g}"
    if first.kind == "parameter":
        said = f"forward computes with other values of {module}, off by {first.by:.3g}, on {where}"
    elif first.kind == "arrived":
        said = (
            f"what {module} gives ({of}) is right where it is made, and not where it has come to, on {where}: "
            "the message between the stages holds something else"
        )
    else:
        said = f"the first that is off is what {module} gives ({of}), on {where}"
    return replace(found, name=first.name or found.name, rank=ranks[0], likely=f"{found.likely}; {said}")
