"""What a pipeline schedule is made of: stages that feed each other, and each rank's list of actions on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from stretto.errors import PlanError


class Kind(StrEnum):
    """What one action does with one microbatch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of the stage's inputs and of its weights
    INPUT = "I"  # the gradients of its inputs alone: all that the stages before it wait for
    WEIGHT = "W"  # the gradients of its weights, any time after INPUT


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of the rank that holds ``stage``."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Flow:
    """Which stages there are, where they run, and what feeds what.

    Args:
        ranks: the pipeline rank of each stage; a rank may hold several.
        feeds: (producer, consumer) with producer < consumer: any acyclic graph, skips and branches too.

    Raises:
        PlanError: no stage at all, a negative rank, or a feed that is given twice, that names a stage which isn't
            there, or that leads backwards.
    """

    ranks: tuple[int, ...]
    feeds: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise PlanError(f"flow: each stage needs a rank of at least 0, and there is at least one; got {self.ranks}")
        for feed in self.feeds:
            if not 0 <= feed[0] < feed[1] < len(self.ranks):
                said = f"flow: a feed leads from a stage to a later one of the {len(self.ranks)}, got {feed}"
                raise PlanError(f"{said}; number the stages in an order in which they can run")
            if self.feeds.count(feed) > 1:
                raise PlanError(f"flow: the feed {feed} is given twice; one feed carries all that a stage hands over")

    @classmethod
    def chain(cls, degree: int, chunks: int = 1) -> Flow:
        """Stages in a row, ``chunks`` on each of ``degree`` ranks: stage s on rank s % degree, feeding s + 1."""
        if degree < 1 or chunks < 1:
            raise PlanError(f"flow: a chain needs at least 1 rank and 1 chunk, got degree={degree}, chunks={chunks}")
        stages = range(degree * chunks)
        return cls(tuple(stage % degree for stage in stages), tuple((stage, stage + 1) for stage in stages[:-1]))

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, those without a stage included."""
        return max(self.ranks) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in their order."""
        held = range(len(self.ranks))
        return tuple(tuple(stage for stage in held if self.ranks[stage] == rank) for rank in range(self.num_ranks))

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The stages that feed each stage."""
        return tuple(tuple(sorted(p for p, c in self.feeds if c == stage)) for stage in range(len(self.ranks)))

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each stage feeds."""
        return tuple(tuple(sorted(c for p, c in self.feeds if p == stage)) for stage in range(len(self.ranks)))

    def needs(self, action: Action, gradient: Callable[[int, int], Kind]) -> tuple[Action, ...]:
        """What must have run before ``action``; ``gradient(stage, microbatch)`` says what makes that one's inputs'
        gradients: BACKWARD or INPUT."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return tuple(Action(Kind.FORWARD, other, microbatch) for other in self.producers[stage])
        if action.kind is Kind.WEIGHT:
            return (Action(Kind.INPUT, stage, microbatch),)
        own = Action(Kind.FORWARD, stage, microbatch)
        return (own, *(Action(gradient(other, microbatch), other, microbatch) for other in self.consumers[stage]))


@dataclass(frozen=True)
class Schedule:
    """Each rank's actions, in the order in which it runs them; :func:`check_schedule` says whether they can all run."""

    name: str
    flow: Flow
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        every = (action for actions in self.actions for action in actions)
        return frozenset((action.stage, action.microbatch) for action in every if action.kind is Kind.INPUT)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions, of any rank, that must have run before ``action``."""
        return self.flow.needs(action, self.gradient)

    def gradient(self, stage: int, microbatch: int) -> Kind:
        """What makes the gradients of the stage's inputs for this microbatch: INPUT if it is split, else BACKWARD."""
        return Kind.INPUT if (stage, microbatch) in self._split else Kind.BACKWARD
