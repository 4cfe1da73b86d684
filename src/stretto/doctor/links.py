"""How long calls between workers take here, by kind, members and size; for the planner."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from stretto.comm.group import SHARED_MEMORY, Group, Rendezvous
from stretto.comm.members import Members
from stretto.errors import LaunchError
from stretto.launch import LocalLauncher, WorkerContext
from stretto.launch.job import Job
from stretto.mesh import Mesh
from stretto.planner.tables import LinkTable

SIZES: Final = tuple(4**power for power in range(3, 14))  # 64 bytes to 64 MiB
LEAST_ROUNDS, MOST_ROUNDS = 5, 200
COLD: Final = 2**26  # bytes, more than caches hold
SECONDS_EACH: Final = 0.08  # of one kind and size


def measure_links(workers: int, launcher: LocalLauncher) -> LinkTable:
    """The calls of that many workers of this host, over what they would talk in a run.

    Raises:
        UserError: the workers can't be started, or don't find one another.
    """
    result = launcher.run(Job(entry="stretto.doctor.links:work", num_workers=workers))
    first = next(iter(result.results.values()), None)
    if first is None:
        raise LaunchError(f"the links of {workers} workers were not measured: {result.failure}")
    return LinkTable.from_json(first)


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A worker's entry. Returns the table as JSON; rank 0's is the one that counts."""
    epoch = context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    context.control.on_break(group.break_)
    curves: dict[tuple[str, int], tuple[tuple[int, float], ...]] = {}
    memory = torch.ones(COLD // 4)
    for count in (number for number in range(2, group.size + 1) if group.size % number == 0):
        members = group.along(Mesh((("rest", group.size // count), ("some", count))), "some")
        for kind, call in _calls(members).items():
            curves[kind, count] = tuple(
                (size, _rounded(_seconds(group, members, call, memory, size))) for size in SIZES
            )
    if group.size > 1:
        curves["message", 2] = tuple(_messages(group, memory))
    shared = group.transport == SHARED_MEMORY
    group.close()
    return LinkTable("shared memory" if shared else "gloo", not shared, curves).to_json()


def _calls(members: Members) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Of each kind a call on a tensor, the whole."""

    def sizes(whole: torch.Tensor) -> list[int]:
        return [whole.numel() // members.size] * members.size

    return {
        "all_reduce": members.all_reduce,
        "all_gather": lambda whole: members.gather_parts(whole, sizes(whole)),
        "reduce_scatter": lambda whole: members.reduce_scatter(whole, sizes(whole)),
        "broadcast": members.broadcast,
    }


def _tensors(memory: torch.Tensor, size: int, members: int) -> Iterator[torch.Tensor]:
    """Tensors of that many bytes in turn, of so much memory that none is in a cache when it comes again: what a step
    sends was written a while ago."""
    numel = max(members, size // 4 // members * members)
    count = max(1, memory.numel() // numel)
    for at in itertools.count():
        yield memory[at % count * numel :][:numel]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _seconds(
    group: Group, members: Members, call: Callable[[torch.Tensor], Any], memory: torch.Tensor, size: int
) -> float:
    """The median of calls, each from when all have come."""
    tensors = _tensors(memory, size, members.size)
    call(next(tensors))
    took: list[float] = []
    until = time.perf_counter() + SECONDS_EACH
    rounds = LEAST_ROUNDS
    while len(took) < rounds:
        group.barrier()
        whole = next(tensors)
        began = time.perf_counter()
        call(whole)
        took.append(time.perf_counter() - began)
        if len(took) == LEAST_ROUNDS:  # all make as many, as the slowest of them says
            left = until - time.perf_counter()
            more = left / max(1e-6, statistics.median(took))
            rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, -group.maximum(-more))))
    return group.maximum(statistics.median(took))


def _messages(group: Group, memory: torch.Tensor) -> list[tuple[int, float]]:
    """Half of the way to rank 1 and back."""
    line = group.line(Mesh((("pp", group.size),)), "pp")
    line.open(2 * SIZES[-1], [(0, 1), (1, 0)])
    found = []
    for size in SIZES:
        tensors = _tensors(memory, size, 1)
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, 2**26 // size))
        group.barrier()
        took = []
        for _ in range(rounds if line.rank < 2 else 0):
            tensor = next(tensors)
            began = time.perf_counter()
            for sender in (0, 1):
                if line.rank == sender:
                    line.wait(line.send(tensor, 1 - sender, 0), "a message's delivery")
                else:
                    line.wait(line.receive(tensor, 1 - line.rank, 0), "a message", 1 - line.rank)
            took.append((time.perf_counter() - began) / 2)
        found.append((size, _rounded(group.maximum(statistics.median(took) if took else 0.0))))
    return found
