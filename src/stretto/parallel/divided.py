"""``tp``, ``pp`` and ``branch``: a model cut inside its layers, and into stages, over ranks that have the same samples.

What is cut, and how, comes from the traced graph, whatever the modules are called: axes of its tensors for ``tp``
(:mod:`stretto.graph.cut`; Megatron-LM, arXiv 1909.08053, section 3), stretches of its operations for ``pp``
(:mod:`stretto.graph.stages`; GPipe, arXiv 1811.06965), towers of them for ``branch`` (:mod:`stretto.graph.towers`).
What runs is that graph on a rank's parts: the model's own
operations in their own order. Python that forward runs beside them runs once, when it is traced: for each mode
(training or not) and each shape of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.data import mapped, tensors_in
from stretto.errors import ProbeFailed, Refused
from stretto.graph.autocast import cast_apart
from stretto.graph.cut import Cut, follow_cut
from stretto.graph.regions import NONE, find_regions
from stretto.graph.rules import read
from stretto.graph.stages import Stages, Work, stages_like, work_of
from stretto.graph.trace import Traced, trace
from stretto.observe import free_bytes
from stretto.parallel._base import Around, Call, Holders, Manner, Microbatch, Place, Ranks, given_of
from stretto.parallel.copies import blank_model, dealt_place, narrowed, sparse_parameters, trained
from stretto.parallel.deferred import Deferred
from stretto.parallel.faithful import unchecked, unlike
from stretto.parallel.gathered import lent_place, memory_for
from stretto.parallel.inside import buffer_parts_of, cut_inside, give_parts, parts_of, uncut
from stretto.parallel.layout import Placed, buffer_slices, export_places
from stretto.parallel.measure import Seconds, costs_of
from stretto.parallel.pipeline import Execution, Forwarded
from stretto.parallel.program import Looker, Program
from stretto.parallel.scored import trace_step, unseen
from stretto.parallel.staged import Staged, stage
from stretto.parallel.stretches import Repeating
from stretto.parallel.template import Template
from stretto.plan import Plan
from stretto.schedule import Action, Flow, Kind, Schedule, build_schedule
from stretto.state import Shares, Slice, TensorSpec, assign_owners, deal

_NOTHING: Final = torch.empty(0)


class Divided(Placed):
    """A rank's part of every layer of its stages; ``assignment`` says which there are.

    Raises:
        Refused: the model can't be traced, or can't be cut as the plan says.
    """

    def __init__(self, template: Template, plan: Plan, ranks: Ranks, manner: Manner) -> None:
        self.reduces_once = manner.reduce_once
        types = narrowed(template, manner.compute)
        super().__init__(template.build(ranks.world.device, types), ranks, manner, by_modules=False)
        self._whole = blank_model(template, ranks.world.device, types)  # never written, so it takes no memory
        self._trains, self._plan, self._whole_tensors = template.trainable, plan, manner.whole_tensors
        self._programs: dict[Any, Program] = {}
        self._deferred = Deferred()
        self._alone = ranks.world.alone()
        self._looker: Looker | None = None
        assert manner.example is not None
        self._surround = manner.surround
        traced = self._trace(template, types, manner)
        cut = cut_inside(traced, template, ranks.tensor.size, self._unscored)
        staged = self._staged(traced, template, manner)
        stages = self._stages = staged.stages
        self.assignment, self._flow = staged.assignment, staged.flow
        self.notes = (*self.notes, *cut.notes, *staged.notes)
        self._users = stages.users
        self._cuts = parts_of(cut, traced, template, ranks.tensor.rank)  # also of other stages' layers
        self._holders = {name: self._ranks_of(name, template) for name in template.specs}
        self._refuse_shared({*types, *cast_apart(traced, stages.of)})
        here = {name for name, holders in self._holders.items() if ranks.line.rank in holders}
        self._parts = {name: part if name in here else part.rows(0, 0) for name, part in self._cuts.items()}
        self._cut_buffers = buffer_parts_of(cut, traced, self._whole, ranks.tensor.rank)
        give_parts(self.module, {**self._parts, **{name: part for name, (_, part) in self._cut_buffers.items()}})
        self._places = self._offloaded.places(self._settle(template))
        self._frozen = {name: p.compute for name, p in self._places.items() if not template.trainable[name]}
        self._changes = stages.changes
        self._order = build_schedule(plan.schedule or "1f1b", self._flow, plan.microbatches)
        self.schedule = self._order if plan.line > 1 else None
        self._repeating = _repeating(self._order, manner, self._offloaded.activations)
        program = self._repeated(self._program(stages, cut)) or self._program(stages, cut)
        if self._lender is not None:
            self._lender.lay(self._places, (names for one in program.portions.values() for names in one.parameters))
        self._programs[_key(True, manner.example.given(traced.scored))] = program
        self._forwards = _forward_only(self._flow)
        self._open_line()
        self.module.forward = self._forward(self.module.forward)

    def _trace(self, template: Template, types: Mapping[str, torch.dtype], manner: Manner) -> Traced:
        """What training runs. Raises Refused where the graph computes something else than the model."""
        example, group = manner.example, self.ranks.everyone
        assert example is not None

        def differs(traced: Traced) -> str:
            def look() -> tuple[str, str]:
                copy = blank_model(template, group.device, types)
                return unlike(traced, copy, template.structure, example, free_bytes(group.device))

            said = ("", "")
            if group.rank == 0:  # for all
                try:
                    said = example.aside(look)
                except ProbeFailed as error:
                    said = "", unchecked(error)
            why, note = group.broadcast_json(said)
            self.notes = (*self.notes, *([note] if note else []))
            return str(why)

        traced, self._unscored = trace_step(self._whole.train(), example, self._plan, differs)
        self._scored = example.scoring if traced.scored else None
        if self._unscored:
            self.notes = (*self.notes, f"tp leaves what gives the model's output whole on each rank: {self._unscored}")
        return traced

    def _open_line(self) -> None:
        """Room for what stages send: of one microbatch all that passes, for as many as a rank may be ahead."""
        (program,) = self._programs.values()
        passing = sum(shape.num_bytes for shape in program.shapes.values())
        ranks = self._flow.ranks
        pairs = {(ranks[source], ranks[to]) for source, to in self._flow.feeds if ranks[source] != ranks[to]}
        ahead = min(self._plan.microbatches, self._plan.line + 1)
        self.ranks.line.open(passing * ahead, [*pairs, *((to, source) for source, to in pairs)])

    # ---- what lies where

    def _staged(self, traced: Traced, template: Template, manner: Manner) -> Staged:
        """The first graph in stages, by one rank's measurement."""
        example, everyone = manner.example, self.ranks.everyone
        assert example is not None

        def measure(work: Work) -> list[Seconds]:
            found = costs_of(work, self._whole, template.structure, example) if everyone.rank == 0 else None
            return [(forward, backward) for forward, backward in everyone.broadcast_json(found)]

        return stage(traced, self._trains, self._plan, measure, manner.assignment, template.layout)

    def _ranks_of(self, name: str, template: Template) -> tuple[int, ...]:
        """The ranks of the pipeline that hold a parameter. One that no stage can be without a part of is everywhere."""
        spec = template.specs[name]
        if not spec.shape or not spec.numel:
            return tuple(range(self._plan.line))
        return tuple(sorted({self._flow.ranks[stage] for stage in self._users[name]}))

    def _refuse_shared(self, narrow: Collection[str]) -> None:
        """Raises Refused where one device would add up in a lower precision what stages add up in float32."""
        shared = [n for n, holders in self._holders.items() if len(holders) > 1 and n in narrow and self._trains[n]]
        if shared:
            raise Refused(
                f"plan {self._plan}: {shared[0]} is used by several stages. One device adds the gradients of its uses "
                "in the lower precision that forward computes with, the stages in float32, so the numbers would differ "
                "by that rounding; use fp32, or a plan without pp and branch, or a parameter for each use"
            )

    def _settle(self, template: Template) -> dict[str, Place]:
        """What a rank holds has an owner among those that hold the same."""
        world, stage, line = self.ranks.world, self.ranks.stage, self.ranks.line
        shared = {holders: self.ranks.holders(holders) for holders in sorted(set(self._holders.values()))
                  if len(holders) > 1}  # fmt: skip
        sparse = sparse_parameters(self.module)
        kinds = {}
        for name, holders in self._holders.items():
            adds, alike = shared.get(holders, (world, stage))
            kinds[name] = (adds, adds if self._parts[name].cut else alike)
        owners: dict[str, int] = {}
        for group in dict.fromkeys(alike for _, alike in kinds.values()):
            names = [n for n, (_, alike) in kinds.items() if alike is group and line.rank in self._holders[n]]
            owners |= assign_owners((template.specs[name] for name in names), group.size)
        shares = self._deal(template, sparse)
        found = {}
        for name, parameter in self.module.named_parameters():
            if name in shares:
                found[name] = self._dealt_place(template.specs[name], parameter, shares[name])
                continue
            (adds, alike), spec = kinds[name], template.specs[name]
            held, local = Holders(adds, alike, owners.get(name) == alike.rank), trained(spec, parameter)
            found[name] = Place(spec, self._parts[name], local, parameter, held, sparse=name in sparse)
        return found

    def _dealt_place(self, spec: TensorSpec, parameter: nn.Parameter, shares: Shares) -> Place:
        part, ranks, dealers = self._parts[spec.name], self.ranks, self._dealers
        copies = ranks.replicas if ranks.hybrid else None
        alike = (copies or self._alone) if part.cut else ranks.copies.alike if ranks.hybrid else ranks.tensor
        place = dealt_place(spec, part, parameter, shares, dealers, alike, copies)
        return place if self._lender is None else lent_place(place, shares[dealers.rank].shape)

    @property
    def _dealers(self) -> Members:
        """Those who have the shares of one copy of the weights."""
        return self.ranks.shards if self.ranks.hybrid else self.ranks.world

    def _deal(self, template: Template, sparse: set[str]) -> dict[str, Shares]:
        """From zero=1 on each rank updates a share of what only its own stages use."""
        zero, line = self._plan.zero, self.ranks.line
        shares: dict[str, Shares] = {}
        own = [name for name, holders in self._holders.items() if holders == (line.rank,)]
        specs = {name: replace(template.specs[name], shape=self._parts[name].shape) for name in own}
        if zero:
            dense = [name for name in own if name not in sparse and (zero == 3 or template.trainable[name])]
            # What all ranks of tp have whole is dealt by itself: beside parts, which may be larger on one than on
            # another, it could be dealt otherwise there, and the same share is what counts once in the norm.
            for cut in (True, False):
                some = [specs[name] for name in dense if self._parts[name].cut is cut]
                shares |= deal(some, self._dealers.size, self._whole_tensors)
        parameters, some = dict(self.module.named_parameters()), [specs[name] for name in shares]
        memory = memory_for(parameters, some, shares, self._dealers, self.ranks.everyone, one_copy=zero == 3)
        self._flats, self._lender, notes = memory
        self.notes = (*self.notes, *notes)
        return shares

    def export_state(self) -> Iterator[Slice]:
        """See :class:`Applied`; a buffer that a stage changes is only known there."""
        yield from export_places(self._places)
        cut, every = self._cut_buffers, {name for name, _ in self.module.named_buffers()}
        yield from buffer_slices(self.module, self.ranks.everyone, leave_out={*self._changes, *cut})
        here = {name for name in every if self._flow.ranks[self._changes.get(name, 0)] == self.ranks.line.rank}
        changed = (here & set(self._changes)) - set(cut)
        yield from buffer_slices(self.module, self.ranks.stage, leave_out=every - changed)
        yield from buffer_slices(self.module, self.ranks.world, every - (here & set(cut)), cut)

    # ---- running

    def train(self, microbatches: Sequence[Microbatch], around: Around) -> None:
        """See :class:`Applied`; by the plan's schedule."""
        line, saving, looker = self.ranks.line, self._offloaded.saving, self._looker
        with self._norm.counting(not microbatches[0].ghost):  # with a BatchNorm there is one
            Execution(self._order, line, self._of, microbatches, around, self._deferred, saving, looker).run()
        self._let_go()

    def _let_go(self) -> None:
        """The last parameters that were gathered."""
        if self._lender is not None:
            self._lender.take(())

    def watch(self, looker: Looker | None) -> None:
        """From now on ``looker`` is shown what training computes, until another one is, or None."""
        self._looker = looker

    def _forward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Forward alone, of one batch; its output comes out where the last stage is, elsewhere None does."""

        @functools.wraps(own)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            execution = Execution(self._forwards, self.ranks.line, self._of, [_Once((arguments, keywords))])
            execution.run()
            self._let_go()
            return execution.output

        return forward

    def _of(self, microbatch: Forwarded) -> Program:
        """For another mode or other shapes: the same cut of the same parameters."""
        call = microbatch.call()
        batch = microbatch.samples
        scoring = None if self._scored is None or batch is None else replace(self._scored, batch=batch)
        key = _key(self.module.training, given_of(call, batch, scoring is not None))
        if key not in self._programs:
            if scoring is not None and (why := unseen(scoring.batch)):
                raise Refused(f"plan {self._plan}: {why}; in earlier batches it was a tensor")
            with torch.enable_grad():
                traced = trace(self._whole.train(self.module.training), *call, scoring, self._surround)
            size = self.ranks.tensor.size
            parts = {**self._cuts, **{name: part for name, (_, part) in self._cut_buffers.items()}}
            # What the model gives alone is gathered from the ranks.
            cut = follow_cut(read(traced, output=""), traced, parts, size) if size > 1 else uncut()
            stages = stages_like(work_of(traced, self._trains, self._changes), self._stages)
            self._programs[key] = program = self._program(stages, cut)
            program.let_go()
        return self._programs[key]

    def _program(self, stages: Stages, cut: Cut) -> Program:
        here = [stage for stage, rank in enumerate(self._flow.ranks) if rank == self.ranks.line.rank]
        splits = any(action.kind is Kind.WEIGHT for action in self._order.actions[self.ranks.line.rank])
        later = self._deferred if splits else None
        regions = find_regions(cut, stages.traced) if self._plan.sequence else NONE
        if regions.why and not self._programs:  # of what is trained on first; a shorter batch may have none
            self.notes = (*self.notes, f"sequence=true is inactive: {regions.why}")
        how = self._repeating, self._norm, regions, self._lender
        return Program.build(stages, cut, self.ranks.tensor, here, self.module, later, *how)

    def _repeated(self, program: Program) -> Program | None:
        """The program, as it is computed again, and a note in how many pieces; None where that would save nothing."""
        if self._repeating is None:
            return program
        here = {str(stage): portion.num_pieces for stage, portion in program.portions.items()}
        every = {int(stage): count for found in self.ranks.everyone.gather_json(here) for stage, count in found.items()}
        how, counts = f"recompute={self._repeating.how}", [every[stage] for stage in sorted(every)]
        if counts == [1]:
            said = "the model's traced graph has no place to cut it at that would save memory; its activations are kept"
            self.notes, self._repeating = (*self.notes, f"{how} is inactive: {said}"), None
            if self._lender is not None:
                self._lender.pieces.clear()
            return None
        what = f"stages are computed again in {', '.join(map(str, counts))} pieces"
        what = what if len(counts) > 1 else f"the model's traced graph is computed again in {counts[0]} pieces"
        self.notes = (*self.notes, f"{how}: {what}")
        return program

    # ---- the contract

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`."""
        return self.ranks.tensor.size > 1 or self._norm.active or self._lender is not None

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; gradients are left to the sync rule."""
        with self._norm.counting(not ghost):
            yield
        self._check()
        self._flats.check()

    def _bring(self) -> None:
        """The other shares."""
        self._flats.bring()

    def teardown(self) -> None:
        """See :class:`Applied`."""
        super().teardown()
        self._programs = {}
        del self._whole, self._flats, self._lender


class _Once:
    """A batch that runs forward alone."""

    samples = None

    def __init__(self, call: Call) -> None:
        self._call = call

    def call(self) -> Call:
        """What it was called with."""
        return self._call

    def forward(self, run: Callable[..., Any]) -> Any:
        """What ``run`` gives."""
        arguments, keywords = self._call
        return run(*arguments, **keywords)

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        """Nothing is noted."""
        return nullcontext()


def _repeating(schedule: Schedule, manner: Manner, moved: bool) -> Repeating | None:
    """How a rank's stages are computed again; ``ahead`` is the most that the schedule asks of any stage."""
    if manner.recompute == "none":
        return None
    ahead = dict.fromkeys(range(len(schedule.flow.ranks)), 0)
    for actions in schedule.actions:
        under_way = dict.fromkeys(ahead, 0)
        for action in actions:
            if action.kind is not Kind.WEIGHT:
                under_way[action.stage] += 1 if action.kind is Kind.FORWARD else -1
                ahead[action.stage] = max(ahead[action.stage], under_way[action.stage])
    return Repeating(manner.recompute, ahead, manner.surround, moved)


def _forward_only(flow: Flow) -> Schedule:
    stages = range(len(flow.ranks))
    lists = (
        tuple(Action(Kind.FORWARD, s, 0) for s in stages if flow.ranks[s] == r) for r in range(max(flow.ranks) + 1)
    )
    return Schedule("forward", flow, 1, tuple(lists))


def _key(training: bool, given: tuple[Any, ...]) -> Any:
    """What a trace holds for: the mode, the shapes, and every number that isn't in a tensor."""
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given))
    return training, shapes, repr(mapped(given, lambda _: _NOTHING))
