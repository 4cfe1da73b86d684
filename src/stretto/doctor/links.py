"""How long calls between workers take here, by kind, members and size; for the planner."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

import torch

from stretto.comm.group import SHARED_MEMORY, Group, Rendezvous
from stretto.comm.members import Members
from stretto.launch import LocalLauncher, WorkerContext
from stretto.launch.job import Job, result_of
from stretto.mesh import Mesh
from stretto.planner.tables import LinkTable

SIZES: Final = tuple(4**power for power in range(3, 14))  # 64 bytes to 64 MiB
FEWEST_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 2, 5, 200
LONG: Final = 0.3  # seconds of a call that needn't be made often, nor with more bytes
COLD: Final = 2**26  # bytes, more than caches hold
REST: Final = 0.3  # seconds
CHANCE: Final = 0.1  # of a call: what it may be quicker by chance
SECONDS_EACH: Final = 0.08  # of one kind and size


def measure_links(workers: int, launcher: LocalLauncher) -> LinkTable:
    """The calls of that many workers of this host, over what they would talk in a run.

    Raises:
        UserError: the workers can't be started, or don't find one another.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    result = launcher.run(Job(entry="stretto.doctor.links:work", num_workers=workers, safe_points=False))
    return LinkTable.from_json(result_of(result, f"the links of {workers} workers were not measured")[0])


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A worker's entry. Returns the table as JSON; rank 0's is the one that counts."""
    epoch = context.epoch
    group = Group(Rendezvous(epoch.store, epoch.number, context.rank, context.world_size))
    context.control.on_break(group.break_)
    found = table(group)
    group.close()
    return found.to_json()


def table(group: Group, per_host: int = 0) -> LinkTable:
    """The calls of a group; every member must call it.

    Args:
        per_host: ranks of each host, where there are several.
    """
    host = [rank // per_host if per_host else 0 for rank in range(group.size)]
    curves: dict[tuple[str, int, int], tuple[tuple[int, float], ...]] = {}
    memory = torch.ones(COLD // 4)
    for count in (number for number in range(2, group.size + 1) if group.size % number == 0):
        for axes in (
            (("rest", group.size // count), ("some", count)),
            (("some", count), ("rest", group.size // count)),
        ):
            mesh = Mesh(axes)
            hosts = max(len({host[rank] for rank in line}) for line in mesh.lines("some"))
            if ("all_reduce", count, hosts) in curves:
                continue  # members that are neighbours, and those that aren't, are on as many hosts
            members = group.along(mesh, "some")
            for kind, call in _calls(members).items():
                curves[kind, count, hosts] = _curve(partial(_seconds, group, members, call, memory))
    firsts = [host.index(one) for one in dict.fromkeys(host)]
    burst = _burst(group, memory, curves["all_reduce", group.size, len(firsts)]) if len(firsts) > 1 else 0.0
    pairs = {
        (host[a], host[b]): tuple((size, took + min(took, burst)) for size, took in _messages(group, memory, (a, b)))
        for a, b in combinations(firsts, 2)  # while one sends, the way of the other has a rest
    }
    if host.count(0) > 1:
        curves["message", 2, 1] = _messages(group, memory, (0, 1))
    if pairs:
        curves["message", 2, 2] = max(pairs.values(), key=lambda curve: curve[-1][1] / curve[-1][0])
    shared = group.transport == SHARED_MEMORY
    return LinkTable("shared memory" if shared else "gloo", not shared, curves, per_host, pairs, burst_seconds=burst)


def _curve(seconds: Callable[[int], float]) -> tuple[tuple[int, float], ...]:
    """Sizes and their times, up to one that takes so long that larger ones go at its rate."""
    found: list[tuple[int, float]] = []
    for size in SIZES:
        found.append((size, _rounded(seconds(size))))
        if found[-1][1] > LONG:
            break
    return tuple(found)


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

    def once() -> float:
        group.barrier()
        whole = next(tensors)
        began = time.perf_counter()
        call(whole)
        return time.perf_counter() - began

    return _median(group, once)


def _burst(group: Group, memory: torch.Tensor, curve: Sequence[tuple[int, float]]) -> float:
    """How much quicker an all-reduce of all is after a rest than right after another; 0 where that may be chance."""
    found = 0.0
    for size, took in curve:
        if took < REST / 10:
            continue
        found = _saved(group, _tensors(memory, size, group.size))
        if found < took / 2:  # else a longer call may save more
            break
    return _rounded(found)


def _saved(group: Group, tensors: Iterator[torch.Tensor]) -> float:
    """Seconds, on the member that saves least: all have the same answer."""
    differences, lasted = [], 0.0
    for _ in range(LEAST_ROUNDS):
        time.sleep(REST)
        group.barrier()
        took = []
        for _ in range(2):
            began = time.perf_counter()
            group.all_reduce(next(tensors))
            took.append(time.perf_counter() - began)
        differences.append(took[1] - took[0])
        lasted = max(lasted, took[1])
    differences.sort()
    likely = differences[1] > CHANCE * lasted  # in all rounds but one
    return -group.maximum(-(statistics.median(differences) if likely else 0.0))


def _messages(group: Group, memory: torch.Tensor, pair: tuple[int, int]) -> tuple[tuple[int, float], ...]:
    """Half of the way from one rank to another and back, by size; every member must call it."""
    line = group.line(Mesh((("pp", group.size),)), "pp")
    ways = pair, pair[::-1]
    line.open(2 * SIZES[-1], ways)

    def seconds(size: int) -> float:
        tensors = _tensors(memory, size, 1)

        def once() -> float:
            if line.rank not in pair:
                return 0.0
            tensor = next(tensors)
            began = time.perf_counter()
            for sender, other in ways:
                if line.rank == sender:
                    line.wait(line.send(tensor, other, 0), "a message's delivery")
                else:
                    line.wait(line.receive(tensor, sender, 0), "a message", sender)
            return (time.perf_counter() - began) / 2

        group.barrier()
        return _median(group, once)

    return _curve(seconds)


def _median(group: Group, once: Callable[[], float]) -> float:
    """Of as many times as fit, after a first that isn't counted; the slowest member's. All make as many."""
    long = group.maximum(once()) > LONG
    took: list[float] = []
    until = time.perf_counter() + SECONDS_EACH
    rounds = FEWEST_ROUNDS if long else LEAST_ROUNDS
    while len(took) < rounds:
        took.append(once())
        if len(took) == LEAST_ROUNDS:
            more = (until - time.perf_counter()) / max(1e-6, statistics.median(took))
            rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, -group.maximum(-more))))
    return group.maximum(statistics.median(took))
