"""Before a launch: the probes are run in a process of their own, and their findings are weighed against the plan.

The process is forked before there are workers or a group, and ends before they begin, so no thread, no memory and no
device state of an operator stays behind. Whatever happens to it (too slow, too large, a crash) costs a note.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from stretto.assemble import load_data
from stretto.errors import ProbeFailed, Refused, TaskError, one_line
from stretto.launch.process import Child, fork, pass_death_to_forks
from stretto.observe import free_bytes
from stretto.plan import Plan
from stretto.probes import Findings, optimizer_reach, refusal, split_probe
from stretto.probes.bench import UsersError, runs_in_its_own_types
from stretto.probes.cache import FOLDER_NAME, content_key, read_findings, write_findings
from stretto.probes.verdict import deadlock, pieces_of
from stretto.runfolder import Law, Resolved
from stretto.task import Task

LIMIT_SECONDS: Final = 10.0
BYTES_PER_ELEMENT: Final = 3 * 8  # the model in float64, and as much again twice for what a forward makes of it

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Verdict:
    """What the probes say of a plan, as one process tells it to the others.

    Args:
        refusal: why the plan would change the numbers, or nothing.
        final: no force helps, as the run would never end.
        mistake: a mistake of the task's, in a TaskError's words, or nothing.
        notes: for people.
    """

    refusal: str = ""
    final: bool = False
    mistake: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_json`."""
        return cls(**{**record, "notes": tuple(record["notes"])})


def examine(
    task: Task, plan: Plan, build: Callable[[], nn.Module], run: Path, seconds: float = LIMIT_SECONDS
) -> Verdict:
    """Probes the task, or finds what an earlier launch found, and weighs it against ``plan``.

    A plan that cuts nothing is not probed. To be called where neither workers nor a group exist yet.

    Args:
        build: gives the model; called in the process that probes, which may change what it gets.
        run: the run folder; findings are kept beside it.
        seconds: longest time that the probes may take.
    """
    if pieces_of(plan) == 1:
        return Verdict()
    key, folder = content_key(task), run.parent / FOLDER_NAME
    findings = read_findings(folder, key) if key is not None else None
    if findings is None:
        said, notes = _probe(task, build, seconds)
        if "mistake" in said:
            return Verdict(mistake=said["mistake"])
        nothing = Findings().to_json()
        findings = Findings.from_json(nothing | said.get("split", {}) | said.get("optimizer", {}))
        tells = f"`stretto verify {task.path or 'TASK'} --plan {plan}` tells whether the plan keeps the numbers"
        notes = [f"{note}; {tells}" for note in notes]
        if key is not None and "split" in said:
            write_findings(folder, key, findings)
    else:
        notes = []
    reason, final = refusal(findings, plan), deadlock(findings, plan) is not None
    return Verdict(reason or "", final, notes=(*notes, *findings.notes))


def settle(verdict: Verdict, force: bool, flag: str, report: Report) -> Law:
    """Refuses the plan, or lets it pass with what there is to say.

    Args:
        force: pass a plan all the same, which is told and kept in the run folder.
        flag: how the user asks for that.

    Raises:
        TaskError: the probes met a mistake of the task's.
        Refused: the plan would change the numbers.
    """
    if verdict.mistake:
        raise TaskError(verdict.mistake)
    if verdict.refusal and (verdict.final or not force):
        raise Refused(verdict.refusal + ("" if verdict.final else f"; or train all the same with {flag}"))
    for note in verdict.notes:
        report({"kind": "note", "text": note})
    if verdict.refusal:
        report({"kind": "note", "text": f"the law is not kept: {verdict.refusal}"})
        return Law(kept=False, reason=verdict.refusal)
    if force:
        report({"kind": "note", "text": f"{flag} has no effect: nothing was refused"})
    return Law()


def since(before: Resolved | None, law: Law) -> Law:
    """The law over all starts of a run: what was broken once stays so."""
    return before.law if before is not None and not before.law.kept else law


# ------------------------------------------------------------------------------------- the process that probes


def _probe(task: Task, build: Callable[[], nn.Module], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """What the probes said by the name of the probe, and what kept them from saying more."""
    importlib.import_module("torch._dynamo")  # every optimizer loads it: once here, not in each process that is forked
    reading, writing = os.pipe()
    deadline = time.monotonic() + seconds

    def body() -> int:
        os.close(reading)
        _alone()
        for name, told in _findings(task, build):
            os.write(writing, json.dumps({name: told}).encode() + b"\n")
        return 0

    try:
        child = fork(body)
    except OSError as error:
        os.close(reading)
        return {}, [f"the probes were left out, as the machine has no room for a process: {error.strerror}"]
    finally:
        os.close(writing)
    try:
        text, in_time = _hear(reading, child, deadline)
    finally:
        os.close(reading)
        child.signal(signal.SIGKILL)
        status = child.reap()
    said: dict[str, Any] = {}
    for line in text.splitlines():
        with suppress(ValueError):  # a last line that was cut short
            said.update(json.loads(line))
    notes = [said.pop("note")] if "note" in said else []
    if not in_time:
        notes.append(f"the split probe did not finish in {seconds:g} s")
    elif status:
        notes.append(f"the split probe was ended by {f'signal {-status}' if status < 0 else f'exit code {status}'}")
    return said, notes


def _hear(reading: int, child: Child, deadline: float) -> tuple[bytes, bool]:
    """All that the child writes, and whether it ended in time."""
    heard = b""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(child, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = {fd for fd, _ in poll.poll(left * 1000)}
        if reading in ready:
            data = os.read(reading, 65536)
            heard += data
            if not data:
                poll.unregister(reading)
        elif child.fileno() in ready:
            return heard, True
    return heard, False


def _alone() -> None:
    """Makes this forked process silent, single-threaded, and blind to accelerators, which don't survive a fork."""
    pass_death_to_forks()
    with suppress(OSError):  # where memory runs out after all, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    torch.compiler.set_stance("force_eager")  # compiling would take longer than all else
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the rest of this process


def _findings(task: Task, build: Callable[[], nn.Module]) -> Any:
    """(name, JSON) of each probe, as soon as it is known."""
    try:
        reach = optimizer_reach(task.optimizer)
        yield "optimizer", {"reach": reach.kind, "reach_error": reach.error}
    except ProbeFailed:  # a factory that wants the real model's parameters; verify can still tell
        pass
    try:
        model = build()
        if note := _too_large(model):
            yield "note", note
            return
        dataset = load_data(task)["train"]
    except TaskError as error:
        yield "mistake", one_line(error)
        return
    except Exception:  # the run itself will meet it, and show it whole
        return
    try:
        yield "split", split_probe(task, model, dataset).to_json()
    except TaskError as error:
        yield "mistake", one_line(error)
    except UsersError as error:
        if runs_in_its_own_types(task, model, dataset):
            cause = f"{type(error.__cause__).__name__}: {one_line(error.__cause__)}"
            yield "note", f"the split probe could not run the task in float64 ({cause})"


def _too_large(model: nn.Module) -> str:
    """Why there is no room for the model in float64, or nothing."""
    tensors = (*model.parameters(), *model.buffers())
    needed = BYTES_PER_ELEMENT * sum(tensor.numel() for tensor in tensors)
    free = free_bytes()
    if free is None or needed <= free:
        return ""
    return (
        f"the split probe was left out: in float64 the model needs about {needed / 2**30:.1f} GiB, "
        f"and {free / 2**30:.1f} GiB are free"
    )
