"""The planner's search: equal to going through every plan one by one, with bounds that hold."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planned import GPT, scorer_of
from stretto.errors import PlanError, UserError
from stretto.planner.constants import Constants
from stretto.planner.described import Described
from stretto.planner.hardware import Machines, find_device
from stretto.planner.memory import peak_memory
from stretto.planner.plans import plan_of, setups_of
from stretto.planner.score import Scorer
from stretto.planner.search import search
from stretto.planner.setups import SCHEDULES, Setups
from stretto.planner.software import Software
from stretto.planner.space import Space, divisors, microbatches
from stretto.planner.step import step_time
from stretto.planner.transformer import Transformer

# ------------------------------------------------------------------------------------------ every plan, one by one


def every_plan(model: Transformer, machines: Machines, batch: int, system: Software) -> Iterator[dict[str, Any]]:
    """Written by loops from the rules that ``Space`` states, sharing nothing with it."""
    count, sequence = machines.count, 2048
    for tp in range(1, count + 1):
        if count % tp or model.heads % tp or model.kv_heads % tp or model.ffn % tp:
            continue
        for pp in range(1, count // tp + 1):
            if (count // tp) % pp or pp > model.layers:
                continue
            for cp in range(1, count // tp // pp + 1):
                if (count // tp // pp) % cp or (cp > 1 and (not system.flash or sequence % (2 * cp))):
                    continue
                dp = count // tp // pp // cp
                if dp > batch:
                    continue
                own, seen = math.ceil(batch / dp), set()
                for pieces in range(1, own + 1):
                    micro = math.ceil(own / pieces)
                    if micro in seen:
                        continue
                    seen.add(micro)
                    for cut in (False, True) if tp > 1 else (False,):
                        for recompute in ("none", "selective", "full"):
                            core = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "micro": micro, "microbatches": pieces}
                            core |= {"parallel_sequence": cut, "full": recompute == "full", "fp8": False}
                            core |= {"selective": recompute == "selective", "flash": system.flash, "hidden": False}
                            core |= {"sequence": sequence, "compute_bytes": 2}
                            core |= {"gradient_bytes": system.gradient_bytes}
                            yield from (core | option for option in options(model, machines, core))


def options(model: Transformer, machines: Machines, core: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pp, dp = core["pp"], core["dp"]
    ways = [("1f1b", 1)]
    if pp > 1:
        ways += [("gpipe", 1), ("zero-bubble", 1)]
        for chunks in range(2, model.layers + 1):
            if model.layers % (pp * chunks) == 0 and core["microbatches"] % pp == 0:
                ways.append(("interleaved", chunks))
    cuts = [(0, dp)]
    if dp > 1:
        cuts += [(1, dp), (2, dp)]
        inside = machines.per_host // (core["tp"] * core["cp"])
        if 1 < inside < dp and dp % inside == 0:
            cuts.append((3, inside))
        cuts.append((3, dp))
    for schedule, chunks in ways:
        for zero, shard in cuts:
            for offload in (False, True):
                found = {"schedule": SCHEDULES.index(schedule), "chunks": chunks, "zero": zero, "shard": shard}
                yield found | {"offload": offload}


def exhaustive(scorer: Scorer, most: int) -> tuple[int, list[tuple[str, float]]]:
    space = scorer.space
    model = space.described.model
    rows = list(every_plan(model, space.machines, space.batch, space.system))
    setups = Setups.of(rows)
    seconds = step_time(model, space.machines, scorer.constants, setups, "bf16", space.system.stages).total
    memory = scorer.memory(setups)
    risk, sizes = scorer.risk(memory), memory.total
    best: dict[tuple[Any, ...], tuple[float, float, int]] = {}
    for at, row in enumerate(rows):
        if risk[at] <= scorer.most_risk:
            way = (row["dp"], row["tp"], row["pp"], row["cp"], row["full"])
            best[way] = min(best.get(way, (math.inf, 0.0, 0)), (seconds[at], sizes[at], at))
    order = sorted(best.values())[:most]
    return len(rows), [(plan_of(setups, at), float(time)) for time, _, at in order]


def small_space(seed: int) -> Scorer:
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6, 8, 12])
    hidden = heads * draw.choice([64, 128, 256])
    kv_heads = draw.choice(divisors(heads))
    layers, ffn = draw.choice([1, 2, 4, 6, 8, 12]), draw.choice([2, 3, 4]) * hidden
    model = Transformer(layers, hidden, heads, kv_heads, ffn, draw.choice([1000, 50257]), draw.random() < 0.5)
    count, flash = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24]), draw.random() < 0.7
    device = find_device(draw.choice(["A100", "H100", "V100"]))
    per_host = draw.choice([one for one in divisors(count) if one <= 8])
    machines = Machines(device, count, per_host, draw.choice([3e9, 25e9, 100e9]))
    batch, stages = draw.choice([1, 3, 8, 12, 32, 50]), draw.choice(["shortest", "even", "passing"])
    system = Software(flash=flash, gradient_bytes=draw.choice([2, 4]), stages=stages)
    constants = replace(Constants(), stall_seconds=draw.choice([0.0, 1e-4]), launch_seconds=draw.choice([1e-5, 1e-3]))
    scorer = Scorer(Space(Described(model, 2048), machines, batch, system), constants)
    sizes = np.sort(scorer.memory(scorer.space.cores).total)
    # So much memory that it decides in many spaces: some plans fit, and some don't.
    memory = draw.uniform(1.0, 1.4) * float(sizes[draw.randrange(len(sizes))]) if len(sizes) else 80e9
    machines = replace(machines, device=replace(device, memory_bytes=memory))
    return Scorer(replace(scorer.space, machines=machines), constants)


@pytest.mark.parametrize("seed", range(50))
def test_the_search_equals_going_through_every_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cores in (("CHUNK", 64), ("LOOKED", 24), ("OPENED", 3)):  # so small that small spaces have many of each
        monkeypatch.setattr(f"stretto.planner.search.{name}", cores)
    scorer = small_space(seed)
    candidates, expected = exhaustive(scorer, 8)
    if not expected:
        with pytest.raises(UserError, match=f"none of {candidates:,} plans" if candidates else "no plan has work"):
            search(scorer, 8)
        return
    found = search(scorer, 8)
    assert found.candidates == candidates
    assert [plan_of(found.setups, at) for at in range(len(found.setups))] == [plan for plan, _ in expected]
    np.testing.assert_allclose(found.times.total, [time for _, time in expected], rtol=1e-12)


def test_small_spaces_are_of_all_sorts() -> None:
    """So that equality on them says something: memory decides in some, and not in others; plans are passed over."""
    decided, none, chosen = 0, 0, set()
    for seed in range(50):
        scorer = small_space(seed)
        try:
            found = search(scorer, 8)
        except UserError:
            none += 1
            continue
        free = search(replace(scorer, most_risk=1.0), 1)
        decided += plan_of(free.setups, 0) != plan_of(found.setups, 0)
        chosen |= {key for key, value in vars(found.setups).items() if (value > (value.dtype != bool)).any()}
    assert 1 <= none <= 15
    assert decided >= 10
    assert {"dp", "tp", "pp", "cp", "chunks", "zero", "shard", "micro", "microbatches"} <= chosen
    assert {"full", "selective", "schedule", "parallel_sequence"} <= chosen


# ----------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("memory", [10e9, 24e9, 80e9])
@pytest.mark.parametrize("flash", [True, False])
def test_bounds_hold_for_every_plan_of_a_core(memory: float, flash: bool) -> None:
    """The search passes over cores by these alone: time's floor and least, and the schedule that takes the least."""
    scorer = scorer_of(memory=memory, flash=flash, stages="shortest" if flash else "even")
    space = scorer.space
    some = np.random.default_rng(0).permutation(len(space.cores))[:400]
    cores = space.cores.take(some)
    allowed = space.allowed(cores)
    floor, least = scorer.floor(cores), scorer.least_seconds(cores, allowed)
    may_fit, sizes = scorer.may_fit(cores, allowed)
    assert may_fit.any()
    assert not may_fit.all() or memory > 30e9
    core, way, cut = np.nonzero(allowed[0][:, :, None] & allowed[1][:, None, :])
    setups = space.join(cores.take(core), way, cut)
    seconds, taken = scorer.time(setups).total, scorer.memory(setups)
    fits = scorer.fits(taken)
    for at in range(len(cores)):
        own = core == at
        assert floor[at] <= least[at] * (1 + 1e-12)
        assert least[at] <= seconds[own].min() * (1 + 1e-12)
        if not flash or cores.pp[at] == 1:  # chunks are cut evenly; beside stages that are balanced, that takes longer
            assert least[at] == pytest.approx(seconds[own].min(), rel=1e-12)
        assert sizes[at] == pytest.approx(taken.total[own].min(), rel=1e-12)
        assert may_fit[at] == fits[own].any()


def test_a_search_times_a_small_part_of_its_plans() -> None:
    found = search(scorer_of(count=64, batch=512), 5)
    assert found.candidates > 100_000
    assert found.judged < found.candidates / 20


def test_more_microbatches_of_a_size_are_never_faster() -> None:
    """Why the space has only the least number of them."""
    scorer = scorer_of(batch=50)
    one = setups_of("dp=2,zero=1,tp=2,pp=4,microbatches=5", scorer.space)
    more = replace(one, microbatches=one.microbatches + 1)
    assert scorer.time(more).total[0] > scorer.time(one).total[0]
    assert scorer.memory(more).total[0] >= scorer.memory(one).total[0]


def test_microbatches_have_every_size_once() -> None:
    for samples in (1, 2, 3, 10, 97, 1536):
        table = {}
        for pieces in range(1, samples + 1):
            table.setdefault(math.ceil(samples / pieces), pieces)
        assert microbatches(samples) == list(table.items())


def test_the_search_says_the_same_each_time() -> None:
    one, other = (search(scorer_of(), 8) for _ in range(2))
    assert all((getattr(one.setups, key) == value).all() for key, value in vars(other.setups).items())


def test_of_equal_plans_the_one_with_less_memory_is_taken() -> None:
    """gpipe takes as long as 1f1b by arithmetic, and keeps more."""
    found = search(scorer_of(), 8)
    gpipe = SCHEDULES.index("gpipe")
    for at in np.flatnonzero(found.setups.pp > 1):
        assert found.setups.schedule[at] != gpipe


def test_nothing_fits_is_told_with_the_least_memory() -> None:
    with pytest.raises(UserError, match=r"none of [\d,]+ plans is likely to fit on 16 devices: the least takes .* GB"):
        search(scorer_of(memory=1e9), 5)


# ------------------------------------------------------------------------------------------------------- plans as text


def test_a_plan_reads_as_it_is_written() -> None:
    for count in (1, 8, 64):
        found = search(scorer_of(count=count, batch=256, memory=40e9), 60)
        for at in range(len(found.setups)):
            again = setups_of(plan_of(found.setups, at), scorer_of(count=count, batch=256).space)
            for key, values in vars(found.setups).items():
                assert getattr(again, key)[0] == values[at], (plan_of(found.setups, at), key)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dp=8", "needs 8 device"),
        ("dp=16,pp=1,cpp=2", "cp"),
        ("dp=8,cp=two", "cp needs one whole number"),
        ("dp=4,cp=2,cp=2", "cp needs one whole number"),
        ("dp=1,tp=16,branch=1,offload=all", "isn't predicted"),
        ("dp=16,microbatches=5", "needs a batch of 80"),
        ("dp=4,tp=4,zero=4", "zero must be"),
    ],
)
def test_a_wrong_plan_is_told(text: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        setups_of(text, scorer_of().space)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dp=1,tp=3", "tp=3 doesn't divide heads=16"),
        ("dp=1,pp=3", "pp=3 is over the model's 2 layers"),
        ("dp=1,cp=3", "must divide the sequence"),
    ],
)
def test_a_plan_that_cuts_unevenly_is_told(text: str, word: str) -> None:
    scorer = scorer_of(replace(GPT, layers=2), 3, 64)
    with pytest.raises(PlanError, match=word):
        setups_of(text, scorer.space)


def test_memory_and_time_come_from_the_planner_alone() -> None:
    """The search has no costs of its own."""
    scorer = scorer_of()
    found = search(scorer, 3)
    space = scorer.space
    again = step_time(space.described.model, space.machines, scorer.constants, found.setups, "bf16")
    np.testing.assert_array_equal(again.total, found.times.total)
    memory = peak_memory(space.described.model, found.setups, space.system)
    np.testing.assert_array_equal(memory.total, found.memory.total)
