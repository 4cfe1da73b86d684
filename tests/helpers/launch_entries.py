"""What the workers of the launcher's tests do."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stretto.errors import PeerLost, UserError
from stretto.launch import WorkerContext, current

Payload = dict[str, Any]


def where(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """Who the worker is, and when its entry began."""
    entered = time.monotonic()
    assert current() is context
    return {
        "entered": entered,
        "pid": os.getpid(),
        "host": os.getppid(),
        "member": context.member,
        "rank": context.rank,
        "local_rank": context.local_rank,
        "world_size": context.world_size,
        "epoch": context.epoch.to_message(),
        "prepared": context.prepared,
        "imports_rss_bytes": context.imports_rss_bytes,
        "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")},
        "torch": "torch" in sys.modules,
        "collects": gc.isenabled(),
    }


def count(payload: Payload, report: Any) -> dict[str, Any]:
    """A prepare that says who ran it."""
    print("printed while preparing")
    report({"kind": "note", "text": "preparing"})
    return {"pid": os.getpid(), "threads": len(os.listdir("/proc/self/task"))}


def prepare_user_error(payload: Payload, report: Any) -> None:
    raise UserError("the task has\nno model")


def prepare_program_error(payload: Payload, report: Any) -> None:
    raise KeyError("nothing there")


def prepare_exit(payload: Payload, report: Any) -> None:
    sys.exit(payload["code"])


def prepare_sleep(payload: Payload, report: Any) -> None:
    report({"kind": "pid", "pid": os.getpid()})
    time.sleep(600)


def prepare_killed(payload: Payload, report: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_no_room(payload: Payload, report: Any) -> None:
    """From the second fork on, this host is refused new processes, as by a limit on their number."""
    real, forks = os.fork, iter([True])

    def fork() -> int:
        if next(forks, False):
            return real()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = fork


def talk(payload: Payload, context: WorkerContext) -> None:
    """Many events, and one larger than any socket buffer, right before the end."""
    for number in range(payload["events"]):
        context.control.send({"kind": "number", "number": number})
    time.sleep(payload.get("pause", 0))
    context.control.send({"kind": "large", "text": "x" * payload["bytes"]})
    os.write(1, b"y" * payload["printed"] + b"\n")
    print(f"printed by {context.rank}")
    print(f"and this on standard error by {context.rank}", file=sys.stderr)


def unserious(payload: Payload, context: WorkerContext) -> Any:
    return {"not JSON": object()}


def fail(payload: Payload, context: WorkerContext) -> None:
    """Fails as ``payload["how"]`` says for this rank; ranks without an entry sleep until the break."""
    context.coordinates = f"dp={context.rank}"
    broken = threading.Event()
    context.control.on_break(broken.set)
    how = payload["how"].get(str(context.rank), "wait")
    if how == "user":
        raise UserError("expected a\nsmaller batch")
    if how == "program":
        raise ZeroDivisionError("the first cause")
    if how == "late":
        time.sleep(0.2)
        raise RuntimeError("a later cause")
    if how == "lost":
        raise PeerLost("I only saw it")
    if how == "wrapped":
        try:
            raise PeerLost("I only saw it")
        except PeerLost as error:
            raise RuntimeError("backward failed") from error
    if how == "exit":
        sys.exit(payload["code"])
    if how == "_exit":
        os._exit(payload["code"])
    if how == "signal":
        os.kill(os.getpid(), payload["signal"])
    if how == "done":
        return
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if how == "deaf":
        time.sleep(600)
    assert broken.wait(60)
    raise PeerLost("the group was broken")


def gloo(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """Sums ranks; rank ``payload["dies"]``, if any, does so while the others sleep in the collective."""
    import torch

    from stretto.comm.group import Group, Rendezvous

    group = Group(Rendezvous(context.epoch.store, context.epoch.number, context.rank, context.world_size))
    context.control.on_break(group.break_)
    tensor = torch.full((3,), float(context.rank))
    group.all_reduce(tensor)
    if payload.get("dies") == context.rank:
        time.sleep(0.3)
        raise ValueError("rank-local trouble")
    if "dies" in payload:
        group.all_reduce(tensor)
    group.close()
    return {"sum": tensor.tolist()}


def until_stopped(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """Works until it is asked to stop, then saves."""
    context.control.send({"kind": "pid", "pid": os.getpid(), "host": os.getppid()})
    while not context.control.stop_requested():
        time.sleep(0.01)
    if payload.get("folder"):
        Path(payload["folder"], f"saved-{context.member}").touch()
    return {"stopped": True}


def deaf_to_stop(payload: Payload, context: WorkerContext) -> None:
    context.control.send({"kind": "pid", "pid": os.getpid(), "host": os.getppid()})
    time.sleep(600)


def descendants(payload: Payload, context: WorkerContext) -> None:
    """Starts all that a worker may start: a loader's workers, one from a thread, a program; says their ids; sleeps."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader: Any = iter(DataLoader(TensorDataset(torch.arange(1000)), num_workers=2, persistent_workers=True))
    next(loader)
    program = subprocess.Popen(["sleep", "600"])
    context.control.send({"kind": "ready", "pid": os.getpid(), "host": os.getppid(), "program": program.pid})
    if payload.get("then") == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def second_attempt(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """Fails on the first attempt only."""
    if context.epoch.attempt == 1 and context.rank == 0:
        raise RuntimeError("once")
    if context.epoch.attempt == 1:
        time.sleep(600)
    return {"attempt": context.epoch.attempt}


def like_a_script(payload: Payload, context: WorkerContext) -> None:
    """Leaves work to an exit handler and to a thread."""
    import atexit

    folder = Path(payload["folder"])
    atexit.register((folder / "handler").touch)

    def later() -> None:
        time.sleep(0.2)
        (folder / "thread").touch()

    threading.Thread(target=later).start()
    if payload["how"] == "exit":
        sys.exit(0)


def crash(payload: Payload, context: WorkerContext) -> None:
    import ctypes

    ctypes.string_at(0)


def sharded_backward(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """A new worker's way to its first sharded backward, in seconds from the launcher's request."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    entered = time.monotonic()
    store = dist.FileStore(  # type: ignore[attr-defined]
        context.epoch.store.removeprefix("file://"), context.world_size
    )
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    mesh = DeviceMesh("cpu", list(range(context.world_size)))
    model: torch.nn.Module = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    done = time.monotonic()
    dist.destroy_process_group()
    return {"entered": entered, "done": done}
