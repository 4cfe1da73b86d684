"""Entries of the tests of weights in shared memory: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stretto import training
from stretto.assemble import assemble, build_template, disassemble
from stretto.comm import shm_memory
from stretto.comm.group import Group, Rendezvous
from stretto.comm.shm_memory import SharedMemory
from stretto.data import Feeder, Position, Sampler
from stretto.launch.context import WorkerContext
from stretto.machinery import Machinery
from stretto.plan import Plan
from stretto.step import Stepper
from stretto.task import Task, load_task

prepare = training.prepare


def _train(task: Task, plan: Plan, on: Machinery, steps: int) -> list[float]:
    dataset = task.data()["train"]
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on)
    batches = Sampler(len(dataset), task.recipe.batch, task.recipe.seed).batches(1, Position())
    return [stepper.step(next(batches)).loss for _ in range(steps)]


def _raising(error: OSError) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        raise error

    return call


def _refuse(what: str) -> None:
    """The system refuses this process the memory of the weights."""
    error = OSError(getattr(errno, what, errno.EACCES), "planted")
    if what == "ENOSPC":
        os.posix_fallocate = _raising(error)
    elif what == "EMFILE":
        os.memfd_create = _raising(error)
    elif what == "ENOMEM":  # at the mapping
        vars(shm_memory)["mmap"] = SimpleNamespace(mmap=_raising(error))
    else:
        shown = os.open
        os.open = lambda path, *more, **named: (  # type: ignore[assignment]
            _raising(error)() if str(path).startswith("/proc") else shown(path, *more, **named)
        )


def refused(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Some steps, where ``rank`` is refused the memory of the weights."""
    task, plan = load_task(payload["task"], {"precision": "fp64"}), Plan.parse(payload["plan"])
    group = Group(Rendezvous(context.epoch.store, 1, context.rank, plan.world_size))
    if context.rank == payload["rank"]:
        _refuse(payload["what"])
    on = assemble(task, plan, build_template(task), group)
    return {"layout": type(on.applied).__name__, "note": "; ".join(on.notes), "losses": _train(task, plan, on, 3)}


def killed(payload: dict[str, Any], context: WorkerContext) -> None:
    """The last rank kills itself at some place in forming or using the memory of the weights."""
    task, plan = load_task(payload["task"], {}), Plan.parse(payload["plan"])
    group = Group(Rendezvous(context.epoch.store, 1, context.rank, plan.world_size))
    context.control.on_break(group.break_)
    guilty = context.rank == (0 if payload["where"] == "offer" else plan.world_size - 1)

    def die(*_: Any) -> None:
        if guilty:
            os.kill(os.getpid(), signal.SIGKILL)

    if payload["where"] in ("offer", "take"):
        real = getattr(SharedMemory, payload["where"])
        setattr(SharedMemory, payload["where"], lambda *arguments: (real(*arguments), die())[0])
    on = assemble(task, plan, build_template(task), group)
    if payload["where"] == "update":
        half = on.optimizer.optimizer.step
        on.optimizer.optimizer.step = lambda: (half(), die())[0]  # type: ignore[method-assign]
    elif payload["where"] == "forward":
        on.applied.module.register_forward_hook(die)
    _train(task, plan, on, 3)


def rounds(payload: dict[str, Any], context: WorkerContext) -> list[list[int]]:
    """What this process holds after each round of assembling, a step and disassembling: open files, mapped memory
    files, and resident bytes."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    template = build_template(task)
    found = []
    for number in range(payload["rounds"]):
        group = Group(Rendezvous(context.epoch.store, 1 + number, context.rank, plan.world_size))
        on = assemble(task, plan, template, group)
        _train(task, plan, on, 1)
        disassemble(on)
        del on
        mapped = _text("/proc/self/maps").count("memfd:stretto")
        found.append([len(os.listdir("/proc/self/fd")), mapped, _field("VmRSS:")])
    return found


def sampled(payload: dict[str, Any], context: WorkerContext) -> dict[str, int]:
    """A run as the command line starts it: the peak that it tells, and the one that a thread saw, of what this worker
    has for itself and its part of what all share."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            shared = _field("RssShmem:")
            most = max(most, _field("RssAnon:") + _field("RssFile:") + shared // context.world_size)
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    summary = training.work(payload, context)
    done.set()
    thread.join()
    assert summary is not None
    return {"told": summary["peak_bytes"], "seen": most - context.imports_rss_bytes}


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _field(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in _text("/proc/self/status").splitlines() if name in line)
