"""What a search wants to know of plans: time, memory, and how likely that memory doesn't fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stretto.planner.constants import Constants
from stretto.planner.hardware import Machines
from stretto.planner.memory import Memory, peak_memory
from stretto.planner.risk import DESCRIBED, MOST_RISK, most_bytes, probability_over
from stretto.planner.setups import Array, Flags, Setups
from stretto.planner.space import Space
from stretto.planner.step import StepModel, StepTime


@dataclass(frozen=True)
class Scorer:
    """Judges plans of one space.

    Args:
        constants: of the device and the training system.
        rates: machines like the space's, but with other rates or memory: to ask what they would change.
    """

    space: Space
    constants: Constants
    most_risk: float = MOST_RISK
    rates: Machines | None = None

    @property
    def machines(self) -> Machines:
        """What plans are judged on."""
        return self.rates or self.space.machines

    @cached_property
    def steps(self) -> StepModel:
        """The costs of a step, part by part."""
        space, precision = self.space, self.space.described.precision
        precision = "bf16" if precision == "fp8" else precision  # Setups.fp8 says which products are
        return StepModel(space.described.model, self.machines, self.constants, precision, space.system.stages)

    def time(self, setups: Setups) -> StepTime:
        """Of each setup."""
        return self.steps.time(setups)

    def memory(self, setups: Setups) -> Memory:
        """Of each setup."""
        return peak_memory(self.space.described.model, setups, self.space.system)

    def risk(self, memory: Memory) -> Array:
        """The probability that it doesn't fit."""
        limit = self.machines.device.memory_bytes
        return np.array([probability_over(each, limit, DESCRIBED) for each in memory.total])

    def fits(self, memory: Memory) -> Flags:
        """Whether a plan may be proposed."""
        most = most_bytes(self.machines.device.memory_bytes, self.most_risk, DESCRIBED)
        found: Flags = memory.total <= most
        return found

    def floor(self, cores: Setups) -> Array:
        """Seconds of the longest stage's work: less than any plan of the core takes."""
        return cores.microbatches * self.steps.least_work(cores).longest

    def least_seconds(self, cores: Setups, allowed: tuple[Flags, Flags]) -> Array:
        """What a core takes with the options that suit it best, whatever their memory: parts of a step add up, and a
        schedule decides others than ``zero`` and offload do. No plan of the core takes less; those with several stages
        on a rank take more where one each would be cut unevenly, for theirs are even."""
        steps, join = self.steps, self.space.join
        work, none = steps.least_work(cores), np.zeros(len(cores), np.int64)
        around, shared = np.full(len(cores), np.inf), np.full(len(cores), np.inf)
        for at, fine in enumerate(allowed[0].T):
            bubble, stages = steps.pipeline(join(cores, none + at, none), work)
            around = np.where(fine, np.minimum(around, bubble + stages), around)
        for at, fine in enumerate(allowed[1].T):
            one = join(cores, none, none + at)
            shared = np.where(fine, np.minimum(shared, steps.data(one, work) + steps.update(one)), shared)
        found: Array = cores.microbatches * work.longest + around + shared
        return found

    def may_fit(self, cores: Setups, allowed: tuple[Flags, Flags]) -> tuple[Flags, Array]:
        """Whether any plan of a core may be proposed, and the least memory of one: that of 1f1b, beside which no
        schedule takes less, and of an optimizer on the host."""
        fits, least = np.zeros(len(cores), bool), np.full(len(cores), np.inf)
        none = np.zeros(len(cores), np.int64)  # 1f1b comes first
        for at in np.flatnonzero(self.space.options.offload):
            memory, fine = self.memory(self.space.join(cores, none, none + at)), allowed[1][:, at]
            fits |= fine & self.fits(memory)
            least = np.where(fine, np.minimum(least, memory.total), least)
        return fits, least
