"""Scenes for the process groups' tests: members are forks of one process that has imported torch; nobody helps them.

A scene is a function of its member; what it returns, plain JSON, is that member's report. No launcher stands by, so a
member that should have been freed and isn't hangs until the scene's time is over, and is reported as such.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm_conformance import conformance
from stretto.comm.group import Group, Rendezvous
from stretto.launch.context import WorkerContext


@dataclass
class Member:
    """One process of a scene."""

    rank: int
    size: int
    folder: Path
    options: dict[str, Any]

    def group(self, epoch: int = 1) -> Group:
        """The group of all members."""
        store = f"file://{self.folder}/store"
        return Group(Rendezvous(store, epoch, self.rank, self.size, self.options.get("timeout", 60.0)))

    @staticmethod
    def caught(call: Callable[[], Any], group: Group | None = None) -> dict[str, Any]:
        """How a call ends: the error's type and text, and when, on a clock that all members share."""
        try:
            with group.guard() if group else nullcontext():
                call()
        except Exception as error:
            return {"kind": type(error).__name__, "text": str(error), "at": time.monotonic()}
        return {"kind": None, "text": "", "at": time.monotonic()}


def scene(payload: dict[str, Any], context: WorkerContext) -> list[Any]:
    """Plays ``payload["scene"]`` with ``payload["workers"]`` members: their reports, or ``{"exit": code}``."""
    size = payload["workers"]
    with tempfile.TemporaryDirectory() as folder:
        members = [Member(rank, size, Path(folder), payload.get("options", {})) for rank in range(size)]
        children = [_fork(SCENES[payload["scene"]], member) for member in members]
        deadline = time.monotonic() + payload.get("seconds", 30)
        while time.monotonic() < deadline and any(_runs(child) for child in children):
            time.sleep(0.01)
        codes = []
        for child in children:  # not reaped before: a member that was killed must be missed all the same
            os.kill(child, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        reports = [Path(folder, f"report-{rank}") for rank in range(size)]
        return [
            json.loads(report.read_text()) if report.exists() else {"exit": code}
            for report, code in zip(reports, codes, strict=True)
        ]


def _fork(play: Callable[[Member], Any], member: Member) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        report = play(member)
        aside = member.folder / f"aside-{member.rank}"
        aside.write_text(json.dumps(report))
        aside.rename(member.folder / f"report-{member.rank}")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZT"


def _later(seconds: float, action: Callable[[], Any]) -> None:
    threading.Timer(seconds, action).start()


def conforms(member: Member) -> list[str]:
    """Random calls of every kind; what came out wrong."""
    group = member.group()
    over = dist.new_group(backend="gloo") if member.options["backend"] == "gloo" else group.process_group
    wrong = conformance(over, member.options["backend"], member.options["cases"])
    group.barrier()
    group.close()
    return wrong


def killed(member: Member) -> dict[str, Any]:
    """The last member kills itself: asleep outside, or by a thread while it is in a collective."""
    group = member.group()
    last = member.rank == member.size - 1
    noted = member.folder / "killed-at"
    numbers = torch.zeros(2_000_000)

    def kill() -> None:
        noted.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if last and member.options["inside"]:
        _later(member.options["after"], kill)
    if last and not member.options["inside"]:
        time.sleep(0.3)
        kill()

    def reduce() -> None:
        while True:
            group.all_reduce(numbers)

    found = member.caught(reduce)
    again = member.caught(group.barrier)
    return {**found, "took": found["at"] - float(noted.read_text()), "again": again}


def broken(member: Member) -> dict[str, Any]:
    """Rank 0 waits in an all-reduce and breaks its group from a thread; the others sleep, or are stopped, then call."""
    group = member.group()
    sub = dist.new_group(list(range(member.size)))
    group.barrier()
    if member.rank:
        if member.options["how"] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.6)
        return member.caught(lambda: (group.all_reduce(torch.ones(10)), group.barrier()))
    broke: list[float] = []
    _later(0.3, lambda: (broke.append(time.monotonic()), group.break_()))
    found = member.caught(lambda: group.all_reduce(torch.ones(10)))
    return {**found, "took": found["at"] - broke[0], "sub": member.caught(lambda: dist.barrier(sub))}


def differ(member: Member) -> dict[str, Any]:
    """Each rank makes another call; ``options["calls"]`` says which."""
    group = member.group()
    whole = torch.ones(12)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: group.all_gather(torch.ones(25)),
        "all_reduce": lambda: group.all_reduce(torch.ones(25)),
        "all_reduce of more": lambda: group.all_reduce(torch.ones(26)),
        "all_reduce of doubles": lambda: group.all_reduce(torch.ones(25, dtype=torch.int32)),
        "maximum": lambda: dist.all_reduce(torch.ones(25), op=dist.ReduceOp.MAX),
        "from 0": lambda: dist.broadcast(whole, 0),
        "from 1": lambda: dist.broadcast(whole, 1),
    }
    return member.caught(calls[member.options["calls"][member.rank]])


def alone(member: Member) -> dict[str, Any]:
    """Rank 0 makes a call that the others don't; how long it waits, and how busily."""
    group = member.group()
    group.barrier()
    if member.rank:
        time.sleep(member.options["timeout"] + 0.5)
        return member.caught(group.barrier)
    began, used = time.monotonic(), time.process_time()
    part, whole = torch.ones(3), torch.ones(3 * member.size)
    found = member.caught(lambda: dist.reduce_scatter_tensor(part, whole), group)
    return {**found, "took": found["at"] - began, "busy": time.process_time() - used}


def closed(member: Member) -> dict[str, Any]:
    """Rank 1 closes its group; the others call."""
    group = member.group()
    group.barrier()
    if member.rank == 1:
        group.close()
        return {}
    return member.caught(group.barrier)


def cycles(member: Member) -> dict[str, Any]:
    """Groups one after another in one process, each over the same name."""
    took, open_files = [], []
    for epoch in range(1, 7):
        began = time.monotonic()
        group = member.group(epoch)
        total = torch.ones(1)
        group.all_reduce(total)
        assert total.item() == member.size and not os.listdir("/dev/shm"), os.listdir("/dev/shm")
        group.close()
        took.append(time.monotonic() - began)
        open_files.append(len(os.listdir("/proc/self/fd")))
    return {"took": took, "open_files": open_files, "transport": group.transport}


def no_room(member: Member) -> dict[str, Any]:
    """Rank 0 may make no large file, in memory neither."""
    if member.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    group = member.group()
    total = torch.ones(1)
    group.all_reduce(total)
    report = {"transport": group.transport, "sum": total.item()}
    group.close()
    return report


def late(member: Member) -> dict[str, Any]:
    """Several calls are under way while rank 1 is busy elsewhere; they end in their order, whichever is waited for."""
    group = member.group()
    group.barrier()
    tensors = [torch.full((300_000,), float(number)) for number in range(4)]
    if member.rank == 1:
        time.sleep(0.4)
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    early = [work.is_completed() for work in works]
    works[2].wait()
    after = [work.is_completed() for work in works[:3]]
    value = works[3].get_future().wait()[0]
    report = {"early": early, "after": after, "sums": [int(t[-1]) for t in tensors], "future": int(value[0])}
    group.barrier()
    began = time.monotonic()
    posted = group.all_reduce(torch.ones(10), async_op=True)
    if member.rank == 0:
        time.sleep(0.5)
    posted.wait()
    report["took"] = time.monotonic() - began
    group.barrier()
    group.close()
    return report


def subgroups(member: Member) -> dict[str, Any]:
    """Two by two: a sum over rows, a sum over columns."""
    group = member.group()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = torch.tensor([1.0 + member.rank]), torch.tensor([1.0 + member.rank])
    dist.all_reduce(row, group=rows[member.rank // 2])
    dist.all_reduce(column, group=columns[member.rank % 2])
    group.barrier()
    group.close()
    return {"row": row.item(), "column": column.item()}


def two_threads(member: Member) -> dict[str, Any]:
    """A second thread has a group of its own, and nothing keeps the two in step; then both call alike on one group."""
    group = member.group()
    own = dist.new_group(list(range(member.size)))
    sums: dict[str, float] = {}
    turn = threading.Barrier(2)  # the two threads' calls may mix only where they are alike

    def saver() -> None:
        for number in range(20):
            for _ in range(2):
                total = torch.full((50_000,), float(number))
                dist.all_reduce(total, group=own)
            dist.barrier(own)
            sums["saver"] = total[-1].item()
        turn.wait()
        for _ in range(30):
            dist.all_reduce(torch.ones(300_000), group=group.process_group)

    thread = threading.Thread(target=saver)
    thread.start()
    for number in range(40):
        total = torch.full((30_000,), float(number))
        group.all_reduce(total)
    turn.wait()
    for _ in range(30):
        group.all_reduce(torch.ones(300_000))
    thread.join()
    group.barrier()
    group.close()
    return {**sums, "main": total[-1].item()}


def refused(member: Member) -> dict[str, Any]:
    """What the backend doesn't do; afterwards the group still works."""
    group = member.group()
    one, many = torch.ones(2), [torch.ones(2) for _ in range(member.size)]
    other = 1 - member.rank
    report = {
        "send": member.caught(lambda: dist.send(one, other)),
        "receive": member.caught(lambda: dist.recv(one, other)),
        "gather": member.caught(lambda: dist.gather(one, many if member.rank == 0 else None)),
        "bits": member.caught(lambda: dist.all_reduce(one.int(), op=dist.ReduceOp.BXOR)),
        "sparse": member.caught(lambda: dist.all_reduce(one.to_sparse())),
    }
    group.all_reduce(one)
    group.barrier()
    group.close()
    return {**report, "sum": one[0].item()}


def frameworks(member: Member) -> dict[str, float]:
    """DDP, FSDP2 and DTensor on the group: the largest difference from one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    group = member.group()
    mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("dp",))
    torch.manual_seed(1)
    data = torch.randn(2 * member.size, 7, dtype=torch.float64)
    mine = data[2 * member.rank : 2 * member.rank + 2]

    def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)

    def worst(found: torch.nn.Module) -> float:
        expected = model()
        (expected(data).square().sum() / member.size).backward()
        worst = 0.0
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            worst = max(worst, (gradient - theirs.grad).abs().max().item())
        return worst

    wrapped = torch.nn.parallel.DistributedDataParallel(model())
    wrapped(mine).square().sum().backward()
    report = {"ddp": worst(wrapped.module)}
    for name, dtype in (("fsdp2", torch.float64), ("fsdp2 in float32, which averages", torch.float32)):
        sharded = model(dtype)
        for layer in (sharded[0], sharded):
            fully_shard(layer, mesh=mesh)
        sharded(mine.to(dtype)).square().sum().backward()
        report[name] = worst(sharded) * (1e-8 if dtype == torch.float32 else 1)
    rows = distribute_tensor(data, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)]) if data.shape[1] % member.size == 0 else rows
    report["dtensor"] = (columns.redistribute(mesh, [Replicate()]).to_local() - data).abs().max().item()
    group.barrier()
    group.close()
    return report


SCENES: dict[str, Callable[[Member], Any]] = {
    found.__name__: found
    for found in (conforms, killed, broken, differ, alone, closed, cycles, no_room, late, subgroups, two_threads)
} | {"refused": refused, "frameworks": frameworks}
