"""One step of a pipeline on one rank: its list of actions, and the messages between them.

What a rank does, and in which order, is a schedule (:mod:`stretto.schedule`); this carries it out. A value goes
straight from the stage that makes it to each that needs it, and its gradient straight back. Sending never waits. What
another rank sends is received in the order in which its own list has it sent, a few messages ahead, so that it comes
while something else is computed.

Backward of a stage begins at what it sent on, with the gradients that came back, and ends at what it received
(GPipe, arXiv 1811.06965, section 2.3).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.comm.line import Line, Sending
from stretto.data import tensors_in
from stretto.parallel._base import Around, Call, Microbatch, Roots, given_of
from stretto.parallel.deferred import Deferred, work_off
from stretto.parallel.program import Looker, Program, Result
from stretto.schedule import Action, Kind, Schedule

AHEAD: Final = 2  # messages of one rank that are received before they are asked for


@dataclass(frozen=True)
class Message:
    """What one stage sends to another for one microbatch: values, or gradients of values that came from there."""

    kind: Kind
    source: int
    to: int
    microbatch: int

    @property
    def tag(self) -> int:
        """A number that another message of the step hardly has; below 2**31."""
        key = (str(self.kind), self.source, self.to, self.microbatch)
        return zlib.crc32(repr(key).encode()) >> 1

    def __str__(self) -> str:
        what = "values" if self.kind is Kind.FORWARD else "gradients"
        return f"the receipt of microbatch {self.microbatch + 1}'s {what} from stage {self.source}"


class Forwarded(Protocol):
    """One microbatch, as far as forward goes."""

    samples: Any  # its batch, once it was asked for its call; None where there is no loss

    def call(self) -> Call:
        """What the model is called with."""

    def forward(self, run: Callable[..., Any]) -> Any:
        """``run`` on that, and what becomes of its output."""

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        """Surrounds what is to be noted as work on it."""


@dataclass
class _Kept:
    """What backward of one stage needs of its forward: no values, which can wait elsewhere (``offload``).

    Args:
        arrived: where the gradients of what arrived are found.
        leaving: where those of what was sent on begin.
        after: what backward ends with.
    """

    arrived: dict[fx.Node, torch.Tensor]
    leaving: dict[fx.Node, GradientEdge]
    after: Callable[[], None]
    roots: Roots | None = None


class Execution:
    """A rank's way through a schedule, once.

    Args:
        line: the ranks of the pipeline, in order.
        program: of a microbatch.
        microbatches: as many as the schedule has.
        around: surrounds each backward; None: forward alone.
        deferred: takes weight gradients that a schedule puts off.
        saving: surrounds each forward and loss, and what they keep for backward.
        looker: is shown what every operation of forward gives.
    """

    def __init__(
        self,
        schedule: Schedule,
        line: Line,
        program: Callable[[Forwarded], Program],
        microbatches: Sequence[Forwarded],
        around: Around | None = None,
        deferred: Deferred | None = None,
        saving: Callable[[], AbstractContextManager[None]] = nullcontext,
        looker: Looker | None = None,
    ) -> None:
        self._looker = looker
        self._schedule, self._line, self._program = schedule, line, program
        self._microbatches, self._around, self._saving = microbatches, around, saving
        self._deferred = deferred or Deferred()
        self._put_off: dict[tuple[int, int], list[Any]] = {}  # weight gradients still to be made
        self._ranks = schedule.flow.ranks
        self._programs: dict[int, Program] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._here: dict[Message, list[torch.Tensor]] = {}  # from one stage of this rank to another
        self._inboxes = {
            rank: _Inbox(line, rank, self._from(rank), self._empty) for rank in range(line.size) if rank != line.rank
        }
        self._sent: deque[tuple[Sending, torch.Tensor]] = deque()
        self.output: Any = None

    def run(self) -> None:
        """Carries the list out. Every rank of the line must call it."""
        actions = self._schedule.actions[self._line.rank]
        with self._line.guard():
            for place, action in enumerate(actions):
                self._line.passed(place)
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                elif action.kind is Kind.WEIGHT:
                    self._weights(action, place)
                else:
                    self._backward(action, place)
            self._line.passed(len(actions))
            while self._sent:
                self._line.wait(self._sent.popleft()[0], "the delivery of its last messages")

    # ---- the two actions

    def _forward(self, action: Action) -> None:
        stage, at = action.stage, action.microbatch
        microbatch, program = self._microbatches[at], self._of(at)
        traced = program.stages.traced
        arrived: dict[fx.Node, torch.Tensor] = {}
        slots: dict[fx.Node, torch.Tensor] = {}
        state: torch.Tensor | None = None
        for source in self._sources(program, stage):
            with microbatch.span("receive", stage):
                found = self._take(Message(Kind.FORWARD, source, stage, at))
            if (source, stage) in program.stages.hands_on:
                state = found.pop()
            values = program.stages.incoming[stage].get(source, ())
            for node, raw in zip(values, found, strict=True):
                arrived[node] = value = program.shapes[node].restored(raw)
                if program.shapes[node].carries and torch.is_grad_enabled():
                    slots[node] = _slot(value)
                    arrived[node] = _Arrive.apply(slots[node], value)  # type: ignore[no-untyped-call]
        results: list[Result] = []

        def run(*arguments: Any, **keywords: Any) -> Any:
            given = list(tensors_in(given_of((arguments, keywords), microbatch.samples, traced.scored)))
            if self._looker is not None:
                self._looker.enter(stage, at, program, given)
            if state is not None:
                _set_generators(state, self._line.device)
            results.append(program.portions[stage].run(given, list(arrived.values()), self._looker))
            return results[0].output

        last = stage == program.stages.count - 1
        with microbatch.span("forward", stage), self._saving():
            output = microbatch.forward(run)
            roots = None
            if last and self._around is not None:
                counted = cast(Microbatch, microbatch)
                roots = counted.roots(output) if traced.scored else counted.loss(output)
        for to in self._targets(program, stage):
            nodes = program.stages.incoming[to].get(stage, ())
            leaving = [results[0].leaving[node].detach().permute(program.shapes[node].order) for node in nodes]
            if (stage, to) in program.stages.hands_on:
                leaving.append(_generators(self._line.device))
            with microbatch.span("send", stage):
                self._send(Message(Kind.FORWARD, stage, to, at), leaving)
        if self._around is None:
            self.output = output if last else self.output
            return
        sent = {node: get_gradient_edge(one) for node, one in results[0].leaving.items() if one.requires_grad}
        self._kept[stage, at] = _Kept(slots, sent, results[0].after, roots)

    def _backward(self, action: Action, place: int) -> None:
        stage, at = action.stage, action.microbatch
        microbatch, program, kept = cast(Microbatch, self._microbatches[at]), self._of(at), self._kept.pop((stage, at))
        gradients: dict[fx.Node, torch.Tensor] = {}
        for to in self._targets(program, stage):
            nodes = self._carried(program, stage, to)
            with microbatch.span("receive", stage):
                found = self._take(Message(Kind.BACKWARD, to, stage, at))
            for node, gradient in zip(nodes, found, strict=True):
                gradients[node] = gradients[node] + gradient if node in gradients else gradient

        def backward() -> None:
            if kept.roots is not None:
                microbatch.backward(kept.roots)
                return
            passing = [node for node in gradients if node in kept.leaving]
            if passing:  # a frozen stage has nothing to pass on
                torch.autograd.backward([kept.leaving[n] for n in passing], [gradients[n] for n in passing])

        with self._surrounding(place, microbatch), microbatch.span("backward", stage):
            if action.kind is Kind.INPUT:
                self._put_off[stage, at] = self._deferred.collect(backward)
            else:
                backward()
            kept.after()
        for source in self._sources(program, stage):
            values = [kept.arrived[node] for node in self._carried(program, source, stage)]
            found = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
            with microbatch.span("send", stage):
                self._send(Message(Kind.BACKWARD, stage, source, at), found)

    def _weights(self, action: Action, place: int) -> None:
        microbatch = cast(Microbatch, self._microbatches[action.microbatch])
        with self._surrounding(place, microbatch), microbatch.span("weights", action.stage):
            work_off(self._put_off.pop((action.stage, action.microbatch)))

    def _surrounding(self, place: int, microbatch: Microbatch) -> AbstractContextManager[None]:
        """What surrounds the action at ``place``; whether it is the last of all here, and of its microbatch."""
        assert self._around is not None
        actions = self._schedule.actions[self._line.rank]
        ends = all(other.microbatch != actions[place].microbatch for other in actions[place + 1 :])
        return self._around(last=place == len(actions) - 1, ghost=microbatch.ghost, ends=ends)

    # ---- who sends what to whom

    def _of(self, microbatch: int) -> Program:
        if microbatch not in self._programs:
            self._programs[microbatch] = self._program(self._microbatches[microbatch])
        return self._programs[microbatch]

    @staticmethod
    def _sources(program: Program, stage: int) -> list[int]:
        return [source for source, to in program.stages.feeds if to == stage]

    @staticmethod
    def _targets(program: Program, stage: int) -> list[int]:
        return [to for source, to in program.stages.feeds if source == stage]

    @staticmethod
    def _carried(program: Program, source: int, to: int) -> list[fx.Node]:
        """The values from one stage to another whose gradients come back."""
        return [node for node in program.stages.incoming[to].get(source, ()) if program.shapes[node].carries]

    def _from(self, rank: int) -> Iterator[tuple[Message, int]]:
        """The messages that another rank sends to this one, in its order; each with how many actions it has behind it
        then."""
        for place, action in enumerate(self._schedule.actions[rank]):
            if action.kind is Kind.WEIGHT:
                continue
            program = self._of(action.microbatch)
            kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
            for other in (self._targets if kind is Kind.FORWARD else self._sources)(program, action.stage):
                if self._ranks[other] == self._line.rank:
                    yield Message(kind, action.stage, other, action.microbatch), place + 1

    def _empty(self, message: Message) -> list[torch.Tensor]:
        """Room for what a message holds."""
        program, device = self._of(message.microbatch), self._line.device
        if message.kind is not Kind.FORWARD:
            nodes = self._carried(program, message.to, message.source)
        else:
            nodes = list(program.stages.incoming[message.to].get(message.source, ()))
        forward, shapes = message.kind is Kind.FORWARD, [program.shapes[node] for node in nodes]
        found = [torch.empty(s.sent if forward else s.sizes, dtype=s.dtype, device=device) for s in shapes]
        if message.kind is Kind.FORWARD and (message.source, message.to) in program.stages.hands_on:
            found.append(torch.empty_like(_generators(device)))
        return found

    def _take(self, message: Message) -> list[torch.Tensor]:
        rank = self._ranks[message.source]
        return self._here.pop(message) if rank == self._line.rank else self._inboxes[rank].take(message)

    def _send(self, message: Message, values: Sequence[torch.Tensor]) -> None:
        rank = self._ranks[message.to]
        if rank == self._line.rank:
            self._here[message] = list(values)
            return
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        for value in values:
            whole = value.contiguous()
            if whole.numel():
                self._sent.append((self._line.send(whole, rank, message.tag), whole))


class _Inbox:
    """What one rank sends, in its order.

    Args:
        coming: its messages.
        room: makes the tensors for one.
    """

    def __init__(
        self,
        line: Line,
        rank: int,
        coming: Iterator[tuple[Message, int]],
        room: Callable[[Message], list[torch.Tensor]],
    ) -> None:
        self._line, self._rank, self._coming, self._room = line, rank, coming, room
        self._posted: dict[Message, tuple[int, list[tuple[torch.Tensor, Sending | None]]]] = {}

    def take(self, message: Message) -> list[torch.Tensor]:
        """Waits for a message; others that come before it are kept."""
        while message not in self._posted:
            self._post()
        after, found = self._posted.pop(message)
        for _, work in found:
            if work is not None:
                self._line.wait(work, str(message), self._rank, after)
        while len(self._posted) < AHEAD and self._post():
            pass
        return [tensor for tensor, _ in found]

    def _post(self) -> bool:
        message, after = next(self._coming, (None, 0))
        if message is None:
            return False
        room = self._room(message)
        works = [(one, self._line.receive(one, self._rank, message.tag) if one.numel() else None) for one in room]
        self._posted[message] = after, works
        return True


def _slot(value: torch.Tensor) -> torch.Tensor:
    """Where the gradient of a value is left: of its shape, with the memory of one number."""
    return value.new_zeros(()).expand(value.shape).requires_grad_()


class _Arrive(torch.autograd.Function):
    """A value as it came. The graph holds the slot, and the value only where an operator keeps it: a leaf of its own
    it would hold until backward."""

    @staticmethod
    def forward(ctx: Any, slot: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _generators(device: torch.device) -> torch.Tensor:
    """The state of torch's generators, as a tensor that can be sent."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        return torch.cat([state, torch.cuda.get_rng_state(device)]).to(device)
    return state


def _set_generators(state: torch.Tensor, device: torch.device) -> None:
    host = state.cpu()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(host[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(host[size:], device)
