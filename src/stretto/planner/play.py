"""A pipeline's step played as events: the action lists that the executor runs, with stages of unequal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from stretto.planner.cut import passed
from stretto.planner.score import Scorer
from stretto.planner.setups import SCHEDULES, Setups
from stretto.planner.step import weight_share
from stretto.schedule import Costs, Flow, Schedule, Timeline, build_schedule, simulate

# Actions (some 60 µs each) that are played of all plans together, the best plan first: for each device, within bounds.
ACTIONS_PER_DEVICE, FEWEST_ACTIONS, MOST_ACTIONS = 2, 2_000, 20_000
_KINDS: Final = 2  # of actions on a microbatch at a stage; one more where weights are for themselves


@dataclass(frozen=True)
class Played:
    """One plan's step.

    Args:
        seconds: by events, with what stands beside the pipeline by closed form.
        timeline: of the microbatches that were played: two rounds over the stages, or all where there are fewer.
    """

    seconds: float
    timeline: Timeline


class Player:
    """Plays plans of one search; lists of actions are built once."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._known: dict[tuple[str, int, int, int], Schedule] = {}

    def play(self, setups: Setups) -> list[Played | None]:
        """Each plan; None where there is no pipeline, or where too many actions have been played before it."""
        count = self._scorer.space.machines.count
        left = min(max(ACTIONS_PER_DEVICE * count, FEWEST_ACTIONS), MOST_ACTIONS)
        found: list[Played | None] = []
        for at in range(len(setups)):
            one = setups.take(slice(at, at + 1))
            needed = self._actions(one)
            found.append(self.play_one(one) if one.pp[0] > 1 and needed <= left else None)
            left -= needed if found[-1] else 0
        return found

    def play_one(self, one: Setups) -> Played:
        """A single plan. Where it has more microbatches than two rounds over the stages, a further round takes what the
        second adds to the first, and at least as long as the rank that works most."""
        pp, count = int(one.pp[0]), int(one.microbatches[0])
        costs, few = self._costs(one), min(count, 2 * pp)
        timeline = simulate(self._schedule(one, few), costs)
        seconds = timeline.seconds
        if count > few:
            second = seconds - simulate(self._schedule(one, pp), costs).seconds
            seconds += (count - few) / pp * max(second, max(timeline.busy) / 2)
        beside = self._scorer.time(one)
        return Played(seconds + float(beside.data[0] + beside.update[0]), timeline)

    def _actions(self, one: Setups) -> int:
        """How many are played."""
        pp, count = int(one.pp[0]), int(one.microbatches[0])
        kinds = _KINDS + (SCHEDULES[int(one.schedule[0])] == "zero-bubble")
        return int(one.chunks[0]) * pp * kinds * (count if count <= 2 * pp else 3 * pp)

    def _schedule(self, one: Setups, count: int) -> Schedule:
        key = SCHEDULES[int(one.schedule[0])], int(one.pp[0]), int(one.chunks[0]), count
        if key not in self._known:
            self._known[key] = build_schedule(key[0], Flow.chain(key[1], key[2]), count)
        return self._known[key]

    def _costs(self, one: Setups) -> Costs:
        """Of each stage: its layers, the embedding before the first, the head after the last."""
        steps = self._scorer.steps
        work = steps.work(one)
        seconds = [count * float(work.times.layer[0]) for count in self.cut(one)]
        seconds[0] += float(work.times.embedding[0])
        seconds[-1] += float(work.times.head[0])
        weight = float(weight_share(one)[0])  # forward takes as long
        forward, backward = (tuple(part * each for each in seconds) for part in (weight, 1 - weight))
        return Costs(forward, backward, (weight / (1 - weight),) * len(seconds), float(steps.hop(one)[0]))

    def cut(self, one: Setups) -> list[int]:
        """Layers of each stage, as the closed form has them: of the shortest cut the last has fewer for its head, and
        of the others some have one more."""
        model, rule = self._scorer.space.described.model, self._scorer.space.system.stages
        layers, stages = model.layers, int(one.pp[0] * one.chunks[0])
        if one.chunks[0] == 1 and rule == "passing":
            ends = passed(model, np.full(stages, float(stages)), np.arange(1.0, stages + 1))
            return [int(count) for count in np.diff(ends, prepend=0.0)]
        if one.chunks[0] > 1 or rule == "even":
            last = layers // stages
        else:
            work = self._scorer.steps.work(one)
            head, most = float(work.times.head[0] / work.times.layer[0]), float(work.longest[0] / work.times.layer[0])
            last = max(0, min(layers, int(np.floor(most - head + 1e-9))))
            last = max(last, layers - int(np.floor(most + 1e-9)) * (stages - 1))
        rest, over = divmod(layers - last, stages - 1)
        return [rest + (stage < over) for stage in range(stages - 1)] + [last]
