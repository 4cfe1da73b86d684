"""The traced graph as one rank runs it: its stages of it, on its parts of the tensors, for one shape of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from stretto.comm.members import Members
from stretto.graph.cut import Cut
from stretto.graph.localize import NORM, WHOLE, Localizer, Portion
from stretto.graph.regions import NONE, Regions
from stretto.graph.stages import Stages
from stretto.graph.trace import filled, let_go
from stretto.parallel.again import Several, Told
from stretto.parallel.batchnorm import GlobalBatchNorm, NormOfAll
from stretto.parallel.deferred import Deferred, defer
from stretto.parallel.gathered import Lender, Names, Visit
from stretto.parallel.messages import Heard
from stretto.parallel.sequence import sequence_modules
from stretto.parallel.spread import modules_of
from stretto.parallel.stretches import Repeating, RunGraph, Stretches, plainly


@dataclass(frozen=True)
class Shape:
    """Of a value that passes between stages.

    It arrives as it lay in memory where it was made: of another order a product or a sum in bfloat16 rounds otherwise.

    Args:
        order: its dimensions, the one with the widest steps in memory first.
        carries: its gradient passes back.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    carries: bool

    @property
    def num_bytes(self) -> int:
        """Of the value."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def sent(self) -> list[int]:
        """The sizes, in that order."""
        return [self.sizes[dim] for dim in self.order]

    def restored(self, value: torch.Tensor) -> torch.Tensor:
        """A value that came in that order, with its dimensions in theirs."""
        return value.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def _nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Result:
    """What a stage gives for one microbatch.

    Args:
        leaving: values that other stages need, by node.
        output: of the last stage, the model's, or the loss's terms.
        after: what backward of it ends with.
    """

    leaving: Mapping[fx.Node, torch.Tensor]
    output: Any = None
    after: Callable[[], None] = _nothing


class Looker(Protocol):
    """Looks at what the operations of a rank's stages are given and give; it changes nothing."""

    def enter(self, stage: int, microbatch: int, program: Program, given: Sequence[torch.Tensor]) -> None:
        """A stage begins forward of a microbatch of the step, called with ``given``. The generators are as a
        microbatch begins, before another stage's state is taken over."""

    def see(self, node: fx.Node, value: Any, arrived: bool) -> None:
        """What ``node`` of the whole graph is here: made here, or ``arrived`` from another stage."""


class _Watched(fx.Interpreter):
    """Runs a stage's graph, or a part of it, one operation at a time, and shows each."""

    def __init__(self, portion: Portion, looker: Looker, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._arriving, self._looker = frozenset(portion.arriving), looker

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        value = super().run_node(n)
        if (node := n.meta.get(WHOLE)) is not None:
            self._looker.see(node, value, node in self._arriving)
        return value


class Portioned:
    """One stage on this rank, its parameters and buffers bound to it once.

    Args:
        stretches: the stage in pieces, one run after another; None: it is one.
    """

    def __init__(
        self,
        portion: Portion,
        stages: Stages,
        module: nn.Module,
        stretches: Stretches | None = None,
        lender: Lender | None = None,
    ) -> None:
        self._stretches, self._lender = stretches, lender
        traced = stages.traced
        named = {**traced.parameters, **traced.buffers}
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        places = {name: at for at, name in enumerate(traced.arguments)}
        self._portion, self._tree = portion, traced.output
        self._bound: list[torch.Tensor | int] = [  # a number: the place among the arguments' tensors
            held[named[name]] if name in named else places[name] if name in places else traced.constants[name]
            for name in portion.bound
        ]
        self._mutated = [held[name] for name in portion.mutated]

    def run(
        self, given: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], looker: Looker | None = None
    ) -> Result:
        """``given``: the tensors that the graph is called with; ``arriving``: what other stages sent, in order."""
        bound = [given[one] if isinstance(one, int) else one for one in self._bound]
        run: RunGraph = plainly
        if looker is not None:
            run = lambda graph, values: _Watched(self._portion, looker, graph).run(*values)  # noqa: E731
        values = [*bound, *arriving]
        visit = None if self._lender is None else Visit(self._lender)
        found = run(self._portion.graph, values) if self._stretches is None else self._stretches.run(values, run, visit)
        changed, leaving = len(self._mutated), len(self._portion.leaving)
        with torch.no_grad():
            for buffer, value in zip(self._mutated, found, strict=False):
                buffer.copy_(value)
        sent = dict(zip(self._portion.leaving, found[changed : changed + leaving], strict=True))
        output = filled(self._tree, found[changed + leaving :]) if self._portion.last else None
        return Result(sent, output, _nothing if visit is None else visit.finish)

    def let_go(self) -> None:
        """See :meth:`Program.let_go`."""
        let_go(self._portion.graph, WHOLE)
        if self._stretches is not None:
            self._stretches.let_go()

    @property
    def num_pieces(self) -> int:
        """In how many it is computed again; 0: it isn't."""
        return 0 if self._stretches is None else len(self._stretches.pieces)

    @property
    def parameters(self) -> list[Names]:
        """The names of those that each piece uses."""
        return [] if self._stretches is None else self._stretches.parameters

    @property
    def arriving(self) -> tuple[fx.Node, ...]:
        """The values of other stages that it needs, in order."""
        return self._portion.arriving


@dataclass(frozen=True)
class Program:
    """All that a rank needs for calls of one shape.

    Args:
        stages: of the whole graph.
        portions: of the stages that run here.
        shapes: of every value that passes between any two stages, on this rank.
        localizer: knows what part of each value lies here.
    """

    stages: Stages
    localizer: Localizer
    portions: Mapping[int, Portioned]
    shapes: Mapping[fx.Node, Shape]

    @classmethod
    def build(
        cls,
        stages: Stages,
        cut: Cut,
        tensor: Members,
        here: Sequence[int],
        module: nn.Module,
        deferred: Deferred | None = None,
        repeating: Repeating | None = None,
        norm: GlobalBatchNorm | None = None,
        regions: Regions = NONE,
        lender: Lender | None = None,
    ) -> Program:
        """For the stages ``here``, with the parameters that ``module`` holds.

        Args:
            tensor: those who cut the model inside.
            deferred: where weight gradients can be put off.
            repeating: how backward computes the stages again; None: it has what forward computed.
            norm: takes the statistics of all workers' samples, for a model that normalises over the batch.
            regions: what lies in parts along a sequence.
            lender: has the parameters of a piece while it runs; None: they are there.
        """
        localizer = Localizer(stages, cut, tensor.rank, regions)
        heard = Heard()
        keeps = heard if repeating is not None and repeating.how == "selective" else None
        modules = {**modules_of(tensor, keeps), **sequence_modules(tensor, keeps)}
        told: Told = heard
        if norm is not None:
            modules[NORM], told = NormOfAll(norm), Several((norm, heard))
        known = None if lender is None else lender.pieces
        portions = {}
        for stage in here:
            portion = localizer.build(stage, modules)
            if deferred is not None:
                defer(portion.graph, set(stages.traced.parameters), deferred)
            stretches = None
            if repeating is not None or lender is not None:
                stretches = Stretches(portion, stage, localizer, stages.traced, repeating, told, known)
            portions[stage] = Portioned(portion, stages, module, stretches, lender)
        shapes = {}
        for sources in stages.incoming:
            for node in (one for values in sources.values() for one in values):
                value, sizes = node.meta["val"], tuple(localizer.shape(node))
                steps = [-step for step in value.stride()]
                order = tuple(sorted(range(value.dim()), key=steps.__getitem__))
                shapes[node] = Shape(sizes, value.dtype, order, node in stages.carries)
        return cls(stages, localizer, portions, shapes)

    def let_go(self) -> None:
        """Of what only building it needed; a :class:`Looker` still finds all it asks for."""
        let_go(self.stages.traced.graph, "val", "nn_module_stack")
        for portion in self.portions.values():
            portion.let_go()
