"""A plan's ranks, each run alone for a few steps: what a step will take, and the memory, before anything is launched.

A rank's part runs as in training (the same layout, optimizer and messages, by the same code), but each call to the
others is answered on the spot (:mod:`stretto.comm.echo`), so its numbers mean nothing and its times do. The ranks'
notes are then played together with the times of the cluster's links (:mod:`stretto.planner.replay`). Ranks of one host
run at the same time, as they will share its cores and its memory's rate; one host's after another's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

from stretto.ahead import AHEAD, Alone, shapes_to_evaluate, step_on_what_asks_more
from stretto.assemble import assemble, build_template, open_data
from stretto.checkpoint.snapshot import snapshot_slices
from stretto.cluster import Cluster
from stretto.comm.echo import EchoGroup, sockets_bytes
from stretto.data import Feeder, Position, Sampler, derive_seed, seed_everything
from stretto.errors import PlanError, UserError, one_line
from stretto.evaluation import evaluate_ends
from stretto.launch.context import stay_on_loopback
from stretto.launch.process import Child, fork, pass_death_to_forks
from stretto.launch.worker import set_threads
from stretto.machinery import Machinery
from stretto.observe import give_back, peak_rss_bytes, rss_bytes
from stretto.parallel import Template
from stretto.parallel.apply import check
from stretto.plan import Plan
from stretto.planner.replay import Event, Prices, Replayed, replay
from stretto.preload import ANY_PLAN, preloads_of
from stretto.task import Task, load_task

WARM: Final = 2  # steps that aren't looked at: memory and caches are cold
STEPS: Final = 5


class RehearsalError(UserError):
    """A rank's process ended by itself."""


@dataclass(frozen=True)
class Rehearsed:
    """A plan, each of whose ranks has run alone.

    Args:
        plan: in words.
        steps: of each step what each rank did, see :mod:`stretto.planner.replay`; ranks that ran at the same time are
            beside each other, for a step lasts as long as its slowest rank.
        memory: of each rank, beside what the process had before the model was built: bytes once the model was laid out,
            after the steps, and at the most, as ``summary.json`` has it of a run.
        assignment: which operations are in which stage, for a plan that cuts the traced graph; JSON.
        samples: that the task has to train on.
        varied: the batches differ in their shapes.
        refused: why the plan doesn't fit the task; the rest is empty then.
    """

    plan: str
    steps: tuple[tuple[tuple[Event, ...], ...], ...] = ()
    memory: tuple[tuple[int, int, int], ...] = ()
    assignment: dict[str, Any] | None = None
    samples: int = 0
    varied: bool = False
    refused: str = ""

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of each rank, the most that it had."""
        return tuple(most for _, _, most in self.memory)

    def play(self, prices: Prices) -> Replayed:
        """The step of median length."""
        found = sorted((replay(step, prices) for step in self.steps), key=lambda step: step.seconds)
        return found[len(found) // 2]


@dataclass(frozen=True)
class Rehearsals:
    """A task whose plans are to be run rank by rank.

    Args:
        apart: the ranks will share no memory, as on several hosts.
        per_host: ranks of one host; 0: all will be on one.
        cores: of a host, shared among its ranks.
        imports_bytes: resident memory of a forked process before the model was built.
    """

    task: Task
    template: Template
    apart: bool = False
    per_host: int = 0
    cores: int = 1
    imports_bytes: int = 0

    @classmethod
    def of(
        cls,
        path: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        plans: Sequence[Plan] = ANY_PLAN,
        apart: bool = False,
        per_host: int = 0,
        cores: int | None = None,
    ) -> Rehearsals:
        """Loads the task and builds the model, once for all plans. The process must not have run an operator on several
        threads: their pool would not survive the fork of the ranks.

        Args:
            plans: what workers of these have loaded before the fork is loaded before; usually all that there is.
            cores: all that this process may use, where none are given.
        """
        set_threads(1)
        for name in preloads_of(plans):
            importlib.import_module(name)
        first = _Player(partial(_bare, apart))
        try:
            imports_bytes = int(first.hear())
        finally:
            first.end()
        task = load_task(path, settings)
        return cls(task, build_template(task), apart, per_host, cores or Cluster.measure().cores, imports_bytes)

    def run(self, plan: Plan) -> Rehearsed:
        """Every rank of ``plan`` for a few steps, each in a process forked from this one.

        Raises:
            RehearsalError: a rank's process ended by itself, such as for want of memory.
        """
        try:
            check(self.template, plan)
        except PlanError as error:
            return Rehearsed(str(plan), refused=one_line(error))
        heard, answers = list[dict[str, Any]](), list[Any]()
        at_once = self.per_host or plan.world_size
        for first in range(0, plan.world_size, at_once):
            ranks = range(first, min(first + at_once, plan.world_size))
            heard += self._on_one_host(plan, ranks, answers)
            if any("refused" in one for one in heard):
                break
        if refused := next((one["refused"] for one in heard if "refused" in one), ""):
            return Rehearsed(str(plan), refused=refused)
        steps = tuple(
            tuple(tuple(map(_event, step)) for step in ranks)
            for ranks in zip(*(one["steps"] for one in heard), strict=True)
        )
        memory = tuple(tuple(one["memory"]) for one in heard)
        varied = any(one["varied"] for one in heard)
        return Rehearsed(str(plan), steps, memory, heard[0]["assignment"], heard[0]["samples"], varied)

    def _on_one_host(self, plan: Plan, ranks: range, answers: list[Any]) -> list[dict[str, Any]]:
        """What each of the ranks says in the end, or why it refused.

        Args:
            answers: what rank 0 told the others as it laid out; empty before, filled by it.
        """
        players, heard = list[_Player](), list[dict[str, Any]]()
        try:
            for rank in ranks:
                players.append(_Player(partial(self._play, plan, rank, len(ranks), list(answers))))
                if rank == 0:
                    heard.append(players[0].hear())
                    if "refused" in heard[0]:
                        return heard
                    answers += heard[0]["answers"]
            heard += [player.hear() for player in players[len(heard) :]]
            if not any("refused" in one for one in heard):
                for player in players:
                    player.go()
                heard = [player.hear() for player in players]
            return heard
        finally:
            for player in players:
                player.end()

    def _play(self, plan: Plan, rank: int, at_once: int, answers: list[Any], said: _Said) -> None:
        """One rank's process: lays out, waits for the others of its host to have laid out, steps."""
        set_threads(max(1, self.cores // at_once))
        try:
            _run(self, plan, EchoGroup(rank, plan.world_size, self.apart, answers), said)
        except PlanError as error:
            said.say({"refused": one_line(error)})
        except UserError as error:
            said.say({"mistake": one_line(error)})


def _bare(apart: bool, said: _Said) -> None:
    """Says the memory of a process forked as a worker is, without what it hasn't touched: that from which a rank's is
    counted. What sockets take is a rank's own."""
    found = rss_bytes()
    if apart:
        stay_on_loopback()
        found -= sockets_bytes()
    said.say(found)


class _Said:
    """The way of a rank's process to the one that forked it."""

    def __init__(self, writing: int, waiting: int) -> None:
        self._writing, self._waiting = writing, waiting

    def say(self, value: Any) -> None:
        """One line."""
        with open(self._writing, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(value).encode() + b"\n")

    def wait(self) -> None:
        """Until the other side lets it go on."""
        os.read(self._waiting, 1)


class _Player:
    """The process of one rank."""

    def __init__(self, body: Callable[[_Said], None]) -> None:
        reading, writing = os.pipe()
        waiting, telling = os.pipe()

        def run() -> int:
            os.close(reading)
            os.close(telling)
            pass_death_to_forks()
            body(_Said(writing, waiting))
            return 0

        self._child: Child | None = fork(run, own_group=True)
        os.close(writing)
        os.close(waiting)
        self._pipe, self._telling = open(reading, "rb"), telling  # noqa: SIM115  # closed by end()

    def hear(self) -> Any:
        """What it says next."""
        line = self._pipe.readline()
        if not line:
            assert self._child is not None
            child, self._child = self._child, None
            code = child.reap()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RehearsalError(f"a rank that was run alone ended by {how}; its own words are above, if it had any")
        if isinstance(found := json.loads(line), dict) and "mistake" in found:
            raise UserError(found["mistake"])
        return found

    def go(self) -> None:
        """Lets it begin its steps."""
        with suppress(BrokenPipeError):
            os.write(self._telling, b"!")

    def end(self) -> None:
        """It isn't needed any more."""
        self._pipe.close()
        os.close(self._telling)
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.reap()


def _run(of: Rehearsals, plan: Plan, group: EchoGroup, said: _Said) -> None:
    task = of.task
    data = open_data(task, plan, group)
    feeder = data["train"]
    machinery = assemble(task, plan, of.template, group, forced=True)
    stepper = Alone(task, plan, feeder, machinery)
    seed_everything(derive_seed(task.recipe.seed, "loop"))
    sharers = 1 if of.apart else group.size
    peak = peak_rss_bytes(sharers)  # before the template goes: what is shared now is known only now
    of.template.release()
    laid_out = rss_bytes(sharers)
    said.say({"answers": group.answers})
    said.wait()
    batches = list(islice(Sampler(len(feeder), task.recipe.batch, task.recipe.seed).batches(1, Position()), AHEAD))
    feeder.expect((piece.ids, batch.start.epoch) for batch in batches for piece in stepper.pieces(batch))
    steps = []
    for batch in batches[: WARM + STEPS]:
        group.notes.take()
        began = time.perf_counter()
        stepper.step(batch)
        steps.append(_events(began, group.notes.take(), time.perf_counter()))
    coming = batches[: max(task.recipe.steps, WARM + STEPS)]
    traces = step_on_what_asks_more(stepper, coming, partial(rss_bytes, sharers))
    give_back()
    kept = rss_bytes(sharers)
    _end(of, plan, machinery, data)
    peak = max(peak, peak_rss_bytes(sharers))
    left = traces.left
    if traces.each_bytes and "val" in data:
        left += shapes_to_evaluate(task, plan, machinery, data["val"])
    more = traces.each_bytes * left
    memory = [laid_out - of.imports_bytes, *(size + more - of.imports_bytes for size in (kept, peak))]
    assignment = cast(Any, machinery.applied).assignment.to_json() if plan.traced else None
    counts = {"samples": len(feeder), "varied": stepper.varied}
    said.say({"steps": steps[WARM:], "memory": memory, "assignment": assignment, **counts})


def _end(of: Rehearsals, plan: Plan, machinery: Machinery, data: Mapping[str, Feeder]) -> None:
    """What takes memory outside of steps: an evaluation, and a checkpoint that is written while training goes on."""
    if "val" in data:
        evaluate_ends(of.task, plan, machinery, data["val"])
    if of.task.recipe.save_every:
        snapshot_slices([*machinery.applied.export_state(), *machinery.optimizer.export_state()])


def _events(began: float, entries: Sequence[tuple[str, float, float, tuple[Any, ...]]], ended: float) -> list[Event]:
    """What the rank did, with its own work between its calls; what answering took is left out."""
    found: list[Event] = []
    at = began
    for what, entered, left, details in entries:
        found += [("work", entered - at), (what, *details)]
        at = left
    return [*found, ("work", ended - at)]


def _event(one: Sequence[Any]) -> Event:
    """From JSON."""
    return tuple(tuple(part) if isinstance(part, list) else part for part in one)
