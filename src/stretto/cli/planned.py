"""What ``stretto plan --model`` prints: plans of a model that is only described."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from stretto.cli.options import write_picture
from stretto.cli.words import count, duration
from stretto.errors import UserError, nearest
from stretto.planner.advise import MEMORY, PARTS, PLAYED, Advice, Advised, advise, explain_plan, frontier
from stretto.planner.constants import find_constants, read_sets
from stretto.planner.described import read_cluster, read_model
from stretto.planner.goodput import Failures, goodput
from stretto.planner.mixed import Use, uses
from stretto.planner.score import Scorer
from stretto.planner.software import read_software
from stretto.planner.space import Space

DISK_RATE: Final = 1e9  # bytes/s at which a device's part of a checkpoint is written


@dataclass(frozen=True)
class Wanted:
    """What is asked beside plans.

    Args:
        explain: a plan to be judged alone; ``drawn``: a file for a picture.
        planned: what stretto can't run yet is looked at as well.
        tokens: of an epoch; ``price``: dollars of a device for an hour.
        days: of a run, in which a device fails every ``mtbf_hours``.
    """

    explain: str | None
    drawn: Path | None
    planned: bool
    tokens: float | None
    price: float | None
    days: float | None
    mtbf_hours: float

    def __post_init__(self) -> None:
        """Raises UserError for what means nothing."""
        if (self.price is not None and self.tokens is None) or min(self.price or 1, self.tokens or 1) <= 0:
            raise UserError("--price needs --tokens, the size of an epoch, and both are over 0")
        if min(self.mtbf_hours, 1 if self.days is None else self.days) <= 0:
            raise UserError("--days and --mtbf-hours are over 0")


@dataclass(frozen=True)
class _Answer:
    """What is found on some of a cluster's kinds of hosts."""

    use: Use
    scorer: Scorer
    plans: Sequence[Advised]
    advice: Advice | None = None


def plan_described(model: Path, on: str, batch: int, software: str, wanted: Wanted, json: bool) -> None:
    """Searches, or judges one plan; draws; and prints."""
    begin = perf_counter()
    systems = read_software()
    if software not in systems:
        known = ", ".join(systems)
        raise UserError(f"--software {software}: no such training system{nearest(software, systems)}; known: {known}")
    context = wanted.planned or software != "stretto" or bool(wanted.explain)
    described = read_model(model)
    answers = _answers(
        ((use, Space(described, use.machines, batch, systems[software], context)) for use in uses(read_cluster(on))),
        software,
        wanted.explain,
    )
    best = min(answers, key=lambda one: one.plans[0].seconds)
    scorer, advice, plans, space = best.scorer, best.advice, best.plans, best.scorer.space
    spent = perf_counter() - begin
    if wanted.drawn is not None:
        _draw(scorer, plans[0], wanted.drawn)
    if json:
        found: dict[str, Any] = advice.to_json() if advice else {"plans": [one.to_json() for one in plans]}
        hosts = [{"hosts": one.use.told, "seconds": one.plans[0].seconds} for one in answers]
        found |= {"hosts": hosts} if len(hosts) > 1 else {}
        print(dumps({**found, **_epoch(scorer, plans[0], wanted), **_goodput(scorer, plans[0], wanted)}))
        return
    _print_head(space, software, model)
    _print_hosts(best, answers)
    if advice:
        told = f"the best {PLAYED} ways to cut, exact by closed form, are ranked by events (~: by closed form)"
        print(f"{advice.candidates:,} plans; {told}; {spent:.2f} s")
    _print_plans(plans)
    _print_best(plans[0])
    if advice:
        _print_why(advice)
    _print_epoch(scorer, plans[0], wanted)
    _print_goodput(scorer, plans[0], wanted)
    if software == "stretto" and any(",cp=" in one.plan for one in plans):
        print("note: cp is planned but not built yet in stretto; take a plan without it")
    elif not context:
        print("note: cp isn't built yet in stretto and was left out; --planned looks at it as well")


def _answers(spaces: Iterable[tuple[Use, Space]], software: str, explain: str | None) -> list[_Answer]:
    """Of each way to use the hosts for which there is one. Raises UserError, the first's, where there is none."""
    found, why = list[_Answer](), list[UserError]()
    for use, space in spaces:
        scorer = Scorer(space, find_constants(space.machines.device.name, software))
        try:
            if explain:
                found.append(_Answer(use, scorer, (explain_plan(scorer, explain)[0],)))
            else:
                advice = advise(scorer)
                found.append(_Answer(use, scorer, advice.plans, advice))
        except UserError as error:
            why.append(error)
    if not found:
        raise why[0]
    return found


def _draw(scorer: Scorer, best: Advised, file: Path) -> None:
    from stretto.planner.picture import draw

    played = explain_plan(scorer, best.plan)[1]
    write_picture(file, draw(frontier(scorer), played, f"plan {best.plan}"))


def _print_head(space: Space, software: str, file: Path) -> None:
    model, machines, device = space.described.model, space.machines, space.machines.device
    print(
        f"{file.name}: {model.parameters / 1e9:.4g}e9 parameters on {machines.count:,} {device.name} in hosts of "
        f"{machines.per_host}, {machines.network_rate / 1e9:g} GB/s a device between hosts; "
        f"{space.batch:,} x {space.described.sequence:,} tokens a step in {space.described.precision}"
    )
    if (name := f"{device.name}/{software}") not in read_sets():
        print(f"no constants are known of {name}, so those of what is nearest stand in: trust this less")


def _print_hosts(best: _Answer, answers: Sequence[_Answer]) -> None:
    """Where a cluster has several kinds of hosts: which to take, and what the others would do."""
    if len(best.use.kinds) > 1:
        print(f"{best.use.told}: each counts as the slowest and smallest of them, as all wait for one another")
    for one in answers:
        if one is not best:
            seconds = one.plans[0].seconds
            print(f"{best.use.told} is better than {one.use.told}, by {seconds / best.plans[0].seconds - 1:.1%}")


def _print_plans(plans: Sequence[Advised]) -> None:
    print("\n    step s   tokens/s    MFU  memory  no fit  micro  plan")
    for place, one in enumerate(plans, 1):
        seconds = f"{'' if one.events or 'pp=' not in one.plan else '~'}{_seconds(one.seconds)}"
        memory = f"{one.memory_bytes / 1e9:.1f}"
        print(
            f"{place:<2}{seconds:>8} {count(round(one.tokens_per_second)):>10} {one.mfu:>6.1%} {memory:>4} GB"
            f" {one.risk:>7.1%} {one.micro:>6}  {one.plan}"
        )


def _print_best(best: Advised) -> None:
    times = ", ".join(f"{name} {_seconds(best.parts[name])}" for _, name in PARTS if best.parts[name] > 0)
    sizes = ", ".join(f"{name} {best.memory[name] / 1e9:.1f}" for name in MEMORY if best.memory[name] > 5e7)
    print(f"\nseconds of 1: {times}\nGB of 1, on the rank that needs the most: {sizes}")


def _print_why(advice: Advice) -> None:
    best = advice.plans[0]
    if len(advice.plans) > 1:
        second = advice.plans[1]
        more = {name: second.parts[name] - best.parts[name] for _, name in PARTS}
        order = sorted(more, key=lambda name: -more[name])
        told = [name for name in order[:2] if more[name] > 0] + [name for name in order[-1:] if more[name] < 0]
        why = ", ".join(f"{name} {_signed(more[name])}" for name in told)
        print(f"2 takes {_signed(second.seconds - best.seconds)} s: {why}")
    print(f"what binds: {advice.binds}. Twice as much of each, by closed form:")
    for one in advice.changes:
        same = " (the same plan)" if one.plan == best.plan else f" with {one.plan}"
        print(f"  {one.what:<19} {_seconds(one.seconds):>7} s, {-one.saves:+.1%}{same if one.saves > 1e-3 else ''}")


def _epoch(scorer: Scorer, best: Advised, wanted: Wanted) -> dict[str, float]:
    tokens, price = wanted.tokens, wanted.price
    if tokens is None:
        return {}
    hours = tokens / best.tokens_per_second / 3600
    found = {"epoch_hours": hours}
    return found if price is None else {**found, "epoch_dollars": hours * price * scorer.space.machines.count}


def _print_epoch(scorer: Scorer, best: Advised, wanted: Wanted) -> None:
    if found := _epoch(scorer, best, wanted):
        dollars = f", {found['epoch_dollars']:,.0f} dollars" if "epoch_dollars" in found else ""
        hours = found["epoch_hours"]
        told = f"{hours / 24:,.1f} days" if hours > 48 else duration(3600 * hours)
        print(f"an epoch of {wanted.tokens:,.0f} tokens: {told}{dollars}")


def _goodput(scorer: Scorer, best: Advised, wanted: Wanted) -> dict[str, float]:
    """Of the run, and of one on twice the devices at the same time of a step's work: where adding devices stops paying,
    failures eat what they bring."""
    if wanted.days is None:
        return {}
    count, state = scorer.space.machines.count, 14 * scorer.space.described.model.parameters
    save = state / count / DISK_RATE
    found, twice = (
        goodput(Failures(devices, 3600 * wanted.mtbf_hours), wanted.days, best.seconds, save)
        for devices in (count, 2 * count)
    )
    return {
        "goodput_restart": found.restart,
        "goodput_recovery": found.recovery,
        "checkpoint_seconds": found.interval_seconds,
        "failures": found.failures,
        "twice_restart": 2 * twice.restart / found.restart if found.restart else 0.0,
        "twice_recovery": 2 * twice.recovery / found.recovery if found.recovery else 0.0,
    }


def _print_goodput(scorer: Scorer, best: Advised, wanted: Wanted) -> None:
    if not (found := _goodput(scorer, best, wanted)):
        return
    print(
        f"in {wanted.days:g} days {found['failures']:,.1f} failures: {found['goodput_recovery']:.1%} of the time "
        f"counts if the others go on, {found['goodput_restart']:.1%} if all restart from checkpoints, one every "
        f"{duration(found['checkpoint_seconds'])}\ntwice the devices, if steps took half the time: "
        f"{found['twice_recovery']:.2f} times as much if the others go on, {found['twice_restart']:.2f} with restarts"
    )


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{_seconds(abs(value))}"
