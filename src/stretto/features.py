"""Each key of a plan: whether it does anything, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.plan import Plan


@dataclass(frozen=True)
class Feature:
    """One key of a plan that isn't at its default.

    Args:
        said: what it does, or why it does nothing.
    """

    key: str
    active: bool
    said: str


def features_of(plan: Plan, no_sequence: str = "", lengths: Sequence[int] = ()) -> tuple[Feature, ...]:
    """Of every key that was asked for; ``no_sequence``: why ``sequence=true`` does nothing for the model, and
    ``lengths``: of the sequences that it cuts."""
    found = []
    if plan.dp > 1:
        found.append(Feature(f"dp={plan.dp}", True, f"{plan.dp} ranks (or groups of them) share each global batch"))
    if plan.zero:
        found.append(_zero(plan))
    if 1 < plan.dp_shard < plan.dp:
        said = f"{plan.dp_replicate} copies of the weights, each cut over {plan.dp_shard} ranks"
        found.append(Feature(f"dp_shard={plan.dp_shard}", True, said))
    if plan.tp > 1:
        found.append(Feature(f"tp={plan.tp}", True, f"layers are cut over {plan.tp} ranks, as the parameters tell"))
    if plan.sequence:
        said = "between the layers that tp cuts each rank has its own part of the longest dimension beside batch and "
        said += f"features, of {' and of '.join(map(str, lengths))}"
        found.append(Feature("sequence=true", not no_sequence, no_sequence or said))
    if plan.pp > 1:
        whose = "each tower's stages" if plan.branch > 1 else "stages"
        said = f"{whose} on {plan.pp} ranks, as balanced as they could be measured"
        found.append(Feature(f"pp={plan.pp}", True, said))
    if plan.branch > 1:
        ranks = f"{plan.branch} ranks; they meet on the last"
        ranks = ranks if plan.pp == 1 else f"{plan.branch} times {plan.pp} ranks"
        said = f"towers that don't depend on each other, on {ranks}"
        found.append(Feature(f"branch={plan.branch}", True, said))
    if plan.line > 1:
        found.append(_schedule(plan))
    if plan.microbatches > 1:
        said = f"each rank takes its share of a batch in {plan.microbatches} pieces"
        found.append(Feature(f"microbatches={plan.microbatches}", True, said))
    if plan.recompute != "none":
        said = "backward computes again what forward doesn't keep"
        found.append(Feature(f"recompute={plan.recompute}", True, said))
    if plan.offload != "none":
        said = "where the device is not the host itself, these wait in the host's memory"
        found.append(Feature(f"offload={plan.offload}", True, said))
    if plan.loaders:
        said = f"{plan.loaders} process(es) of each rank fetch its samples ahead"
        found.append(Feature(f"loaders={plan.loaders}", True, said))
    return tuple(found)


def _zero(plan: Plan) -> Feature:
    what = ("", "the optimizer's state", "the optimizer's state and gradients", "weights, gradients and state")
    if plan.dp == 1:
        said = "with dp=1 there is no other rank that holds the same layers, so nothing to cut"
        return Feature(f"zero={plan.zero}", False, said)
    return Feature(f"zero={plan.zero}", True, f"cut over {plan.dp} ranks: {what[plan.zero]}")


def _schedule(plan: Plan) -> Feature:
    key = f"schedule={plan.schedule}"
    if plan.microbatches == 1:
        said = "with one microbatch a rank waits while the others run; give microbatches, best 4 for each rank"
        return Feature(key, False, said)
    chunks = f", {plan.chunks} stages on each rank" if plan.chunks > 1 else ""
    return Feature(key, True, f"{plan.microbatches} microbatches are under way at once where they can be{chunks}")
