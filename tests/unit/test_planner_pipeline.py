"""What a step's parts say of schedules, copies, context and offload; and pipelines played as events."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planned import GPT, scorer_of
from stretto.planner.plans import setups_of
from stretto.planner.play import Player
from stretto.planner.setups import Setups
from stretto.planner.step import longest_stage
from stretto.schedule import simulate

# ------------------------------------------------------------------------------------------------- parts of a step


def test_the_longest_stage_is_that_of_the_best_cut() -> None:
    draw = np.random.default_rng(1)
    for _ in range(300):
        layers, pp = int(draw.integers(1, 40)), int(draw.integers(1, 12))
        pp = min(pp, layers)
        model, scorer = replace(GPT, layers=layers), scorer_of(replace(GPT, layers=layers), pp, 4)
        one = replace(scorer.space.cores.take([0]), pp=np.array([float(pp)]))
        times = scorer.steps.work(one).times
        times = replace(times, head=times.layer * draw.uniform(0, 12))
        layer, head = float(times.layer[0]), float(times.head[0])
        found, has_head = longest_stage(model, times, one, stages="shortest")
        if pp == 1:
            assert (found[0], has_head[0]) == (layers, True)
            continue
        ends = [(last, math.ceil((layers - last) / (pp - 1))) for last in range(layers + 1)]
        best = min(max(last * layer + head, rest * layer) for last, rest in ends)
        assert found[0] * layer + head * has_head[0] == pytest.approx(best, rel=1e-9)


def test_a_zero_bubble_is_a_third_and_half_where_forward_is_done_again() -> None:
    scorer = scorer_of()
    for recompute, share in (("none", 1 / 3), ("full", 1 / 2)):
        plan = f"dp=2,pp=8,microbatches=16,recompute={recompute}"
        plain, filled = (scorer.time(setups_of(plan + more, scorer.space)) for more in ("", ",schedule=zero-bubble"))
        assert filled.bubble[0] == pytest.approx(share * plain.bubble[0])
        assert filled.stages[0] == plain.stages[0]


def test_stages_on_a_rank_divide_the_bubble_and_multiply_messages() -> None:
    scorer = scorer_of(stages="even")
    plan = "dp=2,pp=8,microbatches=16"
    plain = scorer.time(setups_of(plan, scorer.space))
    dealt = scorer.time(setups_of(plan + ",schedule=interleaved,chunks=3", scorer.space))
    assert dealt.bubble[0] == pytest.approx(plain.bubble[0] / 3)
    assert dealt.stages[0] == pytest.approx(plain.stages[0] * 3)


def test_copies_inside_hosts_spare_the_network() -> None:
    """Hybrid sharding gathers within a host; between hosts its copies add gradients up once, cut."""
    slow = scorer_of(batch=256)
    slow = replace(slow, rates=replace(slow.space.machines, network_rate=1e9))
    whole = slow.time(setups_of("dp=16,zero=3,microbatches=8", slow.space))
    hybrid = slow.time(setups_of("dp_replicate=2,dp_shard=8,microbatches=8", slow.space))
    assert hybrid.data[0] < whole.data[0] / 4
    rate = 1e9 * slow.constants.between
    assert hybrid.data[0] > slow.space.described.model.parameters * 4 / 8 / rate  # an all-reduce of two, of an eighth
    quick = replace(slow, rates=replace(slow.space.machines, network_rate=1e15))
    assert quick.time(setups_of("dp_replicate=2,dp_shard=8,microbatches=8", slow.space)).data[0] > 0


def test_context_parallelism_shares_tokens_and_pays_for_its_ring() -> None:
    scorer = scorer_of()
    one, cut = (setups_of(text, scorer.space) for text in ("dp=16,microbatches=4", "dp=8,microbatches=8,cp=2"))
    assert cut.tokens[0] * 2 == one.tokens[0] == 2048
    times = scorer.steps.work(cut).times
    assert scorer.steps.work(one).times.messages[0] == 0
    assert 0 < times.messages[0] < times.layer[0]
    slow = replace(scorer, rates=replace(scorer.space.machines, per_host=1, network_rate=1e9))
    assert slow.steps.work(cut).times.messages[0] > 10 * times.messages[0]
    narrow = replace(scorer, rates=replace(scorer.space.machines, network_rate=1e9))
    assert narrow.steps.work(cut).times.messages[0] == times.messages[0]  # its ring stands in a host
    across = setups_of("dp=1,tp=2,cp=8", scorer.space)
    assert narrow.steps.work(across).times.messages[0] > scorer.steps.work(across).times.messages[0]
    again = setups_of("dp=8,microbatches=8,recompute=full,cp=2", scorer.space)
    assert slow.steps.work(again).times.messages[0] > slow.steps.work(cut).times.messages[0]


def test_stages_that_stand_apart_by_a_host_send_over_the_network() -> None:
    scorer = scorer_of()
    slow = replace(scorer, rates=replace(scorer.space.machines, network_rate=1e9))
    for plan, leaves in (("dp=2,tp=2,pp=4", False), ("dp=2,tp=2,pp=2,cp=2", True), ("dp=8,pp=2", True)):
        one = setups_of(plan, scorer.space)
        assert (slow.steps.hop(one)[0] > scorer.steps.hop(one)[0]) == leaves


def test_an_optimizer_on_the_host_takes_longer() -> None:
    scorer = scorer_of()
    here, away = (setups_of(f"dp=16,zero=1{more}", scorer.space) for more in ("", ",offload=optimizer"))
    assert scorer.time(away).update[0] > 5 * scorer.time(here).update[0]
    assert scorer.time(away).compute[0] == scorer.time(here).compute[0]


# ------------------------------------------------------------------------------------------------------------ events

PIPELINES = (
    "dp=2,tp=2,pp=4,microbatches=16",
    "dp=2,tp=2,pp=4,microbatches=16,schedule=zero-bubble",
    "dp=2,tp=2,pp=4,microbatches=16,schedule=gpipe",
    "dp=2,tp=2,pp=4,microbatches=16,schedule=interleaved,chunks=3",
    "dp=2,pp=8,microbatches=32,recompute=full",
    "dp=4,tp=2,pp=2,microbatches=3",
    *(f"dp=2,pp=8,microbatches={count},schedule=zero-bubble" for count in (1, 2, 5, 8, 11)),
)


@pytest.mark.parametrize("plan", PIPELINES)
@pytest.mark.parametrize("stages", ["shortest", "passing", "even"])
def test_closed_forms_say_what_events_do(plan: str, stages: str) -> None:
    scorer = scorer_of(replace(GPT, layers=48), stages=stages)
    one = setups_of(plan, scorer.space)
    assert Player(scorer).play_one(one).seconds == pytest.approx(float(scorer.time(one).total[0]), rel=0.03)


@pytest.mark.parametrize("plan", PIPELINES)
def test_two_rounds_say_what_all_microbatches_take(plan: str) -> None:
    scorer = scorer_of(replace(GPT, layers=48))
    one, player = setups_of(plan, scorer.space), Player(scorer)
    beside = scorer.time(one)
    played = simulate(player._schedule(one, int(one.microbatches[0])), player._costs(one)).seconds
    whole = played + float(beside.data[0] + beside.update[0])
    assert player.play_one(one).seconds == pytest.approx(whole, rel=2e-3)


def test_the_cut_has_all_layers_and_the_longest_stage_of_the_closed_form() -> None:
    for layers, pp in ((24, 4), (25, 4), (7, 7), (40, 16), (16, 16)):
        for stages in ("shortest", "passing", "even"):
            scorer = scorer_of(replace(GPT, layers=layers), 16, 64, stages=stages)
            one = setups_of(f"dp={16 // pp if 16 % pp == 0 else 1},pp={pp}", scorer.space) if 16 % pp == 0 else None
            if one is None:
                continue
            cut, work = Player(scorer).cut(one), scorer.steps.work(one)
            assert sum(cut) == layers
            assert len(cut) == pp
            if stages != "even":
                layer, head = float(work.times.layer[0]), float(work.times.head[0])
                longest = max([count * layer for count in cut[:-1]] + [cut[-1] * layer + head])
                assert longest == pytest.approx(float(work.longest[0]), rel=1e-9)


def test_so_many_actions_are_played_and_no_more() -> None:
    scorer = scorer_of(replace(GPT, layers=96), 64, 512)
    plans = ["dp=2,pp=32,microbatches=64"] * 2 + ["dp=16,pp=4,microbatches=8"]
    setups = [setups_of(plan, scorer.space) for plan in plans]
    joined = Setups(**{key: np.concatenate([getattr(one, key) for one in setups]) for key in vars(setups[0])})
    played = Player(scorer).play(joined)
    assert [one is not None for one in played] == [False, False, True]
