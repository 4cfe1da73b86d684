"""What ``stretto plan --model`` prints: plans of a model that is only described."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import Any

from stretto.cli.words import count, duration
from stretto.errors import UserError, nearest
from stretto.planner.advise import MEMORY, PARTS, PLAYED, Advice, Advised, advise, explain_plan, frontier
from stretto.planner.constants import find_constants, read_sets
from stretto.planner.described import read_cluster, read_model
from stretto.planner.score import Scorer
from stretto.planner.software import read_software
from stretto.planner.space import Space

Epoch = tuple[float | None, float | None]  # tokens, dollars of a device for an hour


def plan_described(
    model: Path,
    on: str,
    batch: int,
    software: str,
    *,
    explain: str | None,
    drawn: Path | None,
    epoch: Epoch,
    json: bool,
) -> None:
    """Searches, or judges the plan ``explain``; draws where ``drawn`` says a file; and prints."""
    begin = perf_counter()
    systems = read_software()
    if software not in systems:
        known = ", ".join(systems)
        raise UserError(f"--software {software}: no such training system{nearest(software, systems)}; known: {known}")
    space = Space(read_model(model), read_cluster(on), batch, systems[software])
    scorer = Scorer(space, find_constants(space.machines.device.name, software))
    advice = None if explain else advise(scorer)
    plans = advice.plans if advice else (explain_plan(scorer, explain or "")[0],)
    spent = perf_counter() - begin
    if drawn is not None:
        _draw(scorer, plans[0], drawn)
    if json:
        found: dict[str, Any] = advice.to_json() if advice else {"plans": [one.to_json() for one in plans]}
        print(dumps({**found, **_epoch(scorer, plans[0], epoch)}))
        return
    _print_head(space, software, model)
    if advice:
        told = f"the best {PLAYED} ways to cut, exact by closed form, are ranked by events (~: by closed form)"
        print(f"{advice.candidates:,} plans; {told}; {spent:.2f} s")
    _print_plans(plans)
    _print_best(plans[0])
    if advice:
        _print_why(advice)
    _print_epoch(scorer, plans[0], epoch)
    if software == "stretto" and any(",cp=" in one.plan for one in plans):
        print("note: cp is planned but not built yet in stretto; take a plan without it")


def _draw(scorer: Scorer, best: Advised, file: Path) -> None:
    from stretto.planner.picture import draw

    played = explain_plan(scorer, best.plan)[1]
    text = draw(frontier(scorer), played, f"plan {best.plan}")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--picture: {file} can't be written: {error.strerror}") from error


def _print_head(space: Space, software: str, file: Path) -> None:
    model, machines, device = space.described.model, space.machines, space.machines.device
    print(
        f"{file.name}: {model.parameters / 1e9:.4g}e9 parameters on {machines.count:,} {device.name} in hosts of "
        f"{machines.per_host}, {machines.network_rate / 1e9:g} GB/s a device between hosts; "
        f"{space.batch:,} x {space.described.sequence:,} tokens a step in {space.described.precision}"
    )
    if (name := f"{device.name}/{software}") not in read_sets():
        print(f"no constants are known of {name}, so those of what is nearest stand in: trust this less")


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


def _epoch(scorer: Scorer, best: Advised, epoch: Epoch) -> dict[str, float]:
    tokens, price = epoch
    if tokens is None:
        return {}
    hours = tokens / best.tokens_per_second / 3600
    found = {"epoch_hours": hours}
    return found if price is None else {**found, "epoch_dollars": hours * price * scorer.space.machines.count}


def _print_epoch(scorer: Scorer, best: Advised, epoch: Epoch) -> None:
    if found := _epoch(scorer, best, epoch):
        dollars = f", {found['epoch_dollars']:,.0f} dollars" if "epoch_dollars" in found else ""
        hours = found["epoch_hours"]
        told = f"{hours / 24:,.1f} days" if hours > 48 else duration(3600 * hours)
        print(f"an epoch of {epoch[0]:,.0f} tokens: {told}{dollars}")


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{_seconds(abs(value))}"
