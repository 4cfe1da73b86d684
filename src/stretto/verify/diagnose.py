"""From facts to the first divergence and what it probably means. Pure: no torch, no process.

Within a step things are looked at in the order in which they are computed (samples, loss, gradient, norm, weight,
state), because a mistake shows in everything after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stretto.verify.facts import Kind, RankFacts, ReferenceRecord, ReferenceStep, StepFacts, TensorFact
from stretto.verify.report import Divergence, What
from stretto.verify.tolerances import Tolerances, limits_of

EPSILONS: Final[Mapping[str, float]] = MappingProxyType({"bfloat16": 2**-7, "float16": 2**-10})
"""Of the low types: the distance from 1 to the next number."""
NOTABLE: Final = 1e-6
"""A tensor smaller than this share of the largest of its kind can't show a wrong factor beyond the tolerance."""


@dataclass(frozen=True)
class Case:
    """One step of all ranks against one device.

    Args:
        ranks: the ranks' facts of the step, in rank order.
        reference: one device's step; None before the first.
        shares: which share of the batch each rank has; ranks that tp joins have the same one.
    """

    record: ReferenceRecord
    reference: ReferenceStep | None
    ranks: tuple[StepFacts, ...]
    shares: tuple[int, ...]
    limits: Tolerances

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return sum(map(len, self.reference.pieces)) if self.reference else 0

    @property
    def num_microbatches(self) -> int:
        """Pieces of the batch on one rank."""
        return len(self.reference.pieces) // (max(self.shares) + 1) if self.reference else 1

    @property
    def close(self) -> float:
        """How near two ratios must be to count as one: far above rounding, far below a wrong number."""
        return math.sqrt(self.limits.gradient)

    def facts(self, *kinds: Kind) -> list[tuple[int, TensorFact]]:
        """(rank, fact) of every tensor of these kinds."""
        return [(r, fact) for r, step in enumerate(self.ranks) for fact in step.tensors if fact.kind in kinds]

    def wrong(self, *kinds: Kind) -> list[tuple[int, TensorFact]]:
        """Those that differ from one device."""
        return [(rank, fact) for rank, fact in self.facts(*kinds) if fact.differs]


def first_divergence(record: ReferenceRecord, ranks: Sequence[RankFacts]) -> Divergence | None:
    """The first thing in which any rank and one device differ, or None."""
    steps = sorted({facts.step for rank in ranks for facts in rank.steps})
    by_step = [{facts.step: facts for facts in rank.steps} for rank in sorted(ranks, key=lambda r: r.rank)]
    for step in steps:
        case = Case(
            record=record,
            reference=record.steps[step - 1] if step else None,
            ranks=tuple(rank.get(step, StepFacts(step=step)) for rank in by_step),
            shares=tuple(rank.share for rank in sorted(ranks, key=lambda r: r.rank)),
            limits=limits_of(record, step),
        )
        for look in _LOOKS:
            if (found := look(step, case)) is not None:
                return found
    return None


# ---------------------------------------------------------------------------------------- one look at each kind


def _samples(step: int, case: Case) -> Divergence | None:
    if case.reference is None:
        return None
    length = case.num_microbatches
    due = [
        tuple(i for piece in case.reference.pieces[share * length : (share + 1) * length] for i in piece)
        for share in case.shares
    ]
    wrong = [r for r, facts in enumerate(case.ranks) if facts.ids != due[r]]
    if not wrong:
        return None
    counting = {share: facts for facts, share in zip(reversed(case.ranks), reversed(case.shares), strict=True)}
    fed = [i for facts in counting.values() for i in facts.ids]
    twice = [i for i in dict.fromkeys(fed) if fed.count(i) > 1]
    lost = [i for piece in due for i in piece if i not in fed]
    where = [r for r in wrong if any(i in twice for i in case.ranks[r].ids)] or wrong
    parts = []
    if twice:
        holders = sorted({r for r, facts in enumerate(case.ranks) if set(twice) & set(facts.ids)})
        parts.append(f"the sample(s) {_list(twice)} are counted more than once, on rank(s) {_list(holders)}")
    if lost:
        parts.append(f"the sample(s) {_list(lost)} are counted nowhere")
    likely = "; ".join(parts) or f"rank {where[0]} ran other samples, or in another order, than its own"
    named = twice or lost or list(case.ranks[where[0]].ids)
    return Divergence(step, "ids", f"sample {named[0]}", where[0], float(len(named)), likely)


def _initial(step: int, case: Case) -> Divergence | None:
    wrong = case.wrong("weight", "buffer")
    if step or not wrong:
        return None
    off = sorted({rank for rank, _ in wrong})
    if len(off) < len(case.ranks):
        likely = f"rank(s) {_list(off)} began with other weights than one device and the other ranks"
    else:
        likely = "every rank began with other weights than one device: is model() the same each time it is called?"
    return _worst(step, "initial weights", wrong, likely)


def _loss(step: int, case: Case) -> Divergence | None:
    by = max(facts.loss for facts in case.ranks)
    if by <= case.limits.loss:
        return None
    assert case.reference is not None
    ratio = case.ranks[0].loss_ratio
    if (found := _ghost(step, "loss", by, case)) is not None:
        return found
    if (short := _short_batch(case, ratio)) is not None:
        return Divergence(step, "loss", "loss", None, by, short)
    if (norm := _norm_layer(case)) is not None:
        name, rank = norm
        likely = (
            f"the BatchNorm {name!r} took the statistics of each rank's share, not of the whole batch: "
            "they are not summed over ranks"
        )
        for ghost, facts in enumerate(case.ranks):
            if facts.ghosts:
                likely += f"; or they count sample {facts.ghosts[0]}, which rank {ghost} runs with weight 0"
        return Divergence(step, "loss", name, rank, by, likely)
    off = case.ranks[0].weight
    if abs(off - case.reference.weight) > case.limits.loss * abs(case.reference.weight):
        likely = f"the loss weights add up to {off:.9g}, on one device to {case.reference.weight:.9g}"
    elif ratio is not None and any(abs(ratio - r) < case.close for r in (len(case.ranks), 1 / len(case.ranks))):
        likely = f"the loss is {_times(ratio)} one device's: its sum over ranks has a wrong divisor"
    else:
        likely = "forward computes something else here than on one device, though it began with the same weights"
        if step > 1 and any(not fact.whole for _, fact in case.facts("weight")):
            likely += ": were the parts that other ranks update brought here after the last step?"
        likely += _kink(case)
    return Divergence(step, "loss", "loss", None, by, likely)


def _gradient(step: int, case: Case) -> Divergence | None:
    wrong = case.wrong("gradient")
    if not wrong:
        return None
    names = {fact.name for _, fact in wrong}
    ratio = _common_ratio(case)
    apart = _apart(case, "gradient")
    aliases = case.record.aliases.get(next(iter(names)), ()) if len(names) == 1 else ()
    if _is_rounding(case, wrong):
        likely = f"this is the rounding of {case.record.dtype}: gradients are added up in it, not in float32"
    elif (short := _short_batch(case, ratio)) is not None:
        likely = short
    elif aliases and not apart:
        name = next(iter(names))
        likely = (
            f"only {name} is off, which is also {_list(aliases)}: the gradient of a tied weight is the sum of its "
            f"uses, each counted once{_by_factor(wrong)}"
        )
    elif ratio is not None:
        likely = f"every gradient is {_times(ratio)} one device's: the sum over ranks has a wrong divisor"
    elif apart:
        some = "" if len(apart) == len({f.name for _, f in case.facts("gradient")}) else f" of {_list(apart)}"
        shards = any(not fact.whole for _, fact in wrong if fact.name in apart)
        what = "sum over the replicas" if shards else "reduction"
        likely = f"the gradients{some} differ between ranks that should hold the same: their {what} is missing"
    elif (ghost := _ghost(step, "gradient", max(fact.rel for _, fact in wrong), case)) is not None:
        return ghost
    elif len(off := {rank for rank, _ in wrong}) < len(case.ranks):
        likely = f"only rank(s) {_list(sorted(off))} are off: what they should get from the others is missing"
    elif any(not fact.whole for _, fact in wrong):
        likely = (
            "the shards are not the sum over ranks: their reduction is missing, leaves a rank's share out, or went "
        )
        likely += f"to the wrong owner{_of_scales(case)}"
    else:
        shares = "a rank's or a microbatch's share" if case.num_microbatches > 1 else "a rank's share"
        likely = f"all ranks agree on a sum that is not one device's: {shares} is missing or weighed wrongly"
        likely += f"{_of_terms(case)}{_of_scales(case)}{_kink(case)}"
    return _worst(step, "gradient", wrong, likely)


def _norm(step: int, case: Case) -> Divergence | None:
    by = max(facts.norm for facts in case.ranks)
    if by <= case.limits.norm:
        return None
    ratio = case.ranks[0].norm_ratio
    size = len(case.ranks)
    times = "" if ratio is None else f" {_times(ratio)} the right one"
    copies = [n for n in range(2, size + 1) if ratio is not None and abs(ratio - math.sqrt(n)) < case.close]
    if case.reference is not None and not math.isfinite(case.reference.norm):
        finite = [r for r, facts in enumerate(case.ranks) if facts.norm > case.limits.norm]
        likely = (
            "one device's gradient is not finite and its update is left out, but not so on rank(s) "
            f"{_list(finite)}: all ranks must decide alike, by the whole gradient"
        )
        return Divergence(step, "norm", "norm", finite[0], by, likely)
    if copies:
        likely = f"every gradient is right, their norm is{times}: it counts each of {copies[0]} copies"
    elif ratio is not None and ratio < 1:
        likely = f"every gradient is right, their norm is{times}: it misses other ranks' shards"
    else:
        likely = f"every gradient is right, their norm is not{times and ','}{times}: it counts some of them twice"
    return Divergence(step, "norm", "norm", None, by, likely)


def _weight(step: int, case: Case) -> Divergence | None:
    return _after(step, "weight", case, ("weight", "buffer"))


def _state(step: int, case: Case) -> Divergence | None:
    return _after(step, "state", case, ("state",))


_LOOKS: Final[tuple[Callable[[int, Case], Divergence | None], ...]] = (
    _initial,
    _samples,
    _loss,
    _gradient,
    _norm,
    _weight,
    _state,
)


def _after(step: int, what: What, case: Case, kinds: tuple[Kind, ...]) -> Divergence | None:
    """What apply has left behind, while gradients and norm are right."""
    wrong = case.wrong(*kinds)
    if not wrong:
        return None
    idle = [r for r in range(len(case.ranks)) if _is_idle(case, r)]
    stale = [(rank, fact) for rank, fact in wrong if fact.unchanged and rank not in idle]
    if idle and len(idle) < len(case.ranks):
        others = [r for r in range(len(case.ranks)) if r not in idle]
        likely = f"the step was applied on rank(s) {_list(others)} only: nothing moved on rank(s) {_list(idle)}"
        return _worst(step, what, [(r, fact) for r, fact in wrong if r in idle] or wrong, likely)
    if idle:
        return _worst(step, what, wrong, "the step was applied on no rank: nothing moved")
    if stale:
        rank, fact = max(stale, key=lambda pair: pair[1].rel)
        part = "whole copy" if fact.whole else f"shard {fact.box}"
        likely = f"the {part} of {fact.name} on rank {rank} is what it was before the step: it was not updated"
        if fact.whole and (right := set(range(len(case.ranks))) - {r for r, f in wrong if f.name == fact.name}):
            likely += f", while that of rank(s) {_list(sorted(right))} was: do all know that a gradient reached it?"
        return _worst(step, what, stale, likely)
    missing = [(rank, fact) for rank, fact in wrong if fact.missing]
    if missing:
        side = "this plan" if missing[0][1].missing == "plan" else "one device"
        return _worst(step, what, missing, f"{side} keeps no such state: a parameter was reached here, not there")
    if all(fact.kind == "buffer" for _, fact in wrong):
        likely = "forward updates this buffer from a rank's share of the batch alone"
        return _worst(step, what, wrong, f"{likely}, or another stage's was taken")
    if _is_rounding(case, wrong):
        likely = f"this is the rounding of {case.record.dtype}: the copies are updated, not float32 masters"
        return _worst(step, what, wrong, likely)
    likely = "gradients and norm are right, the update is not: other clipping, learning rate or optimizer state"
    off = list(dict.fromkeys(fact.name for _, fact in wrong))
    if what == "weight" and any(
        not fact.differs and not fact.unchanged and fact.name not in off for _, fact in case.facts("weight")
    ):
        likely += f"; only {_list(off)} are off: are they updated as another group of the optimizer's?"
    return _worst(step, what, wrong, likely)


# ------------------------------------------------------------------------------------------------------- clues


def _is_idle(case: Case, rank: int) -> bool:
    """Something should have moved on the rank, and nothing did."""
    own = [fact for fact in case.ranks[rank].tensors if fact.kind == "weight"]
    return any(fact.differs for fact in own) and all(fact.unchanged for fact in own)


def _common_ratio(case: Case) -> float | None:
    """The one factor that every gradient is off by, on every rank that is off; None where there is no such factor."""
    ratios = []
    for facts in case.ranks:
        own = [f for f in facts.tensors if f.kind == "gradient" and f.share > NOTABLE]
        if not any(fact.differs for fact in own):
            continue
        if not all(f.ratio is not None and f.residual is not None and f.residual < case.close for f in own):
            return None
        ratios += [fact.ratio for fact in own if fact.ratio is not None]
    if not ratios or max(ratios) - min(ratios) > case.close * abs(max(ratios, key=abs)):
        return None
    return sorted(ratios)[len(ratios) // 2]


def _short_batch(case: Case, ratio: float | None) -> str | None:
    """Whether ``ratio`` says that a batch with fewer samples than usual was divided by the usual count."""
    nominal, found = case.record.batch, case.num_samples
    if ratio is None or not found or found >= nominal or case.reference is None:
        return None
    weights = [step.weight for step in case.record.steps if step.step < case.reference.step]
    usual = [found / nominal, *(case.reference.weight / weight for weight in weights if weight)]
    if all(abs(ratio - each) > case.close for each in usual):
        return None
    return (
        f"the batch is short, and the sum is {_times(ratio)} one device's: it was divided by the nominal count "
        f"({nominal} samples), not by what it holds ({found})"
    )


def _ghost(step: int, what: What, by: float, case: Case) -> Divergence | None:
    """A rank without samples of its own ran one with weight 0; does it count after all?"""
    ghosts = [(rank, facts.ghosts) for rank, facts in enumerate(case.ranks) if facts.ghosts]
    if not ghosts or case.reference is None:
        return None
    if what == "loss" and case.ranks[0].weight <= case.reference.weight * (1 + case.limits.loss):
        return None
    rank, samples = ghosts[0]
    likely = (
        f"rank {rank} has no sample of its own in this batch of {case.num_samples} and runs sample {samples[0]} with "
        "weight 0: it is counted all the same"
    )
    return Divergence(step, what, f"sample {samples[0]}", rank, by, likely)


def _norm_layer(case: Case) -> tuple[str, int] | None:
    """The first BatchNorm whose running statistics differ, and on which rank most."""
    for name in case.record.batch_norms:
        found = [(r, fact) for r, fact in case.wrong("buffer") if fact.name.rpartition(".")[0] == name]
        if found:
            return name, max(found, key=lambda pair: pair[1].rel)[0]
    return None


def _apart(case: Case, kind: Kind) -> list[str]:
    """Names of which two ranks hold the same part with different values."""
    seen: dict[tuple[str, str], set[tuple[bool, str]]] = {}
    for _, fact in case.facts(kind):
        seen.setdefault((fact.name, fact.box), set()).add((fact.differs, fact.digest))
    return list(dict.fromkeys(name for (name, _), values in seen.items() if len(values) > 1))


def _worst(step: int, what: What, facts: list[tuple[int, TensorFact]], likely: str) -> Divergence:
    """The divergence at the largest of these differences; the lowest rank's among equals."""
    rank, fact = max(facts, key=lambda pair: (pair[1].rel, -pair[0]))
    return Divergence(step, what, fact.name, rank, fact.rel, likely)


def _kink(case: Case) -> str:
    if case.record.dtype != "float32":
        return ""
    return " (in float32 it may be rounding at the kink of a ReLU or maximum: verify in float64)"


def _is_rounding(case: Case, wrong: list[tuple[int, TensorFact]]) -> bool:
    """In a low precision: as far off as its rounding, and no further."""
    epsilon = EPSILONS.get(case.record.dtype, 0.0)
    return all(fact.rel < 2 * epsilon for _, fact in wrong)


def _of_terms(case: Case) -> str:
    terms = case.record.terms
    return f"; is each of {_list(terms)} divided by its own weight?" if len(terms) > 1 else ""


def _of_scales(case: Case) -> str:
    return " (or the loss scale is not the same on all)" if case.record.dtype == "float16" else ""


def _times(ratio: float) -> str:
    return f"{ratio:.6g} times"


def _by_factor(facts: list[tuple[int, TensorFact]]) -> str:
    """The factor, where the tensor is off by one."""
    _, fact = facts[0]
    if fact.ratio is None or fact.residual is None or fact.residual > NOTABLE:
        return ""
    return f" (here {_times(fact.ratio)})"


def _list(items: Sequence[object]) -> str:
    """``a, b, c and 4 more``."""
    shown = ", ".join(str(item) for item in items[:5])
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
