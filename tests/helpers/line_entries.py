"""Entries of the tests of messages between members: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from stretto.comm.line import Line
from stretto.comm.shm_memory import Unavailable
from stretto.errors import PeerLost
from stretto.launch.context import WorkerContext
from stretto.mesh import Mesh
from stretto.plan import Plan
from stretto.training import form_group


def _line(payload: dict[str, Any], context: WorkerContext) -> Line:
    group = form_group(Plan(pp=context.world_size), context)
    line = group.line(Mesh((("pp", context.world_size),)), "pp")
    if payload.get("room"):
        ranks = range(context.world_size)
        line.open(payload["room"], [(one, other) for one in ranks for other in ranks if one != other])
    return line


def crossing(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """All send to all before anyone receives, more than there is room for; received in another order than sent."""
    line = _line(payload, context)
    sizes = [1, 70_000, 3, 400_000, 64, 17]
    kinds = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    others = [rank for rank in range(line.size) if rank != line.rank]

    def value(source: int, tag: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * source + tag)
        kind = kinds[tag % 5]
        return torch.randint(0, 2 if kind is torch.bool else 100, (sizes[tag],), generator=draw).to(kind)

    going = [(line.send(value(line.rank, tag), to, tag), to) for tag in range(len(sizes)) for to in others]
    right = 0
    for tag in sorted(range(len(sizes)), key=lambda tag: (tag * 5) % 7):
        for source in others:
            room = torch.empty_like(value(source, tag))
            line.wait(line.receive(room, source, tag), f"message {tag}", source)
            right += torch.equal(room, value(source, tag))
    for work, _ in going:
        line.wait(work, "what goes")
    return {"right": right, "of": len(sizes) * len(others), "rings": len(line._rings)}


def same_tag(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Messages of one tag come in their order, some before and some after they are expected."""
    line, other = _line(payload, context), 1 - context.rank
    if line.rank == 0:
        for work in [line.send(torch.full((5,), float(number)), other, 3) for number in range(6)]:
            line.wait(work, "what goes")
        return {"seen": []}
    time.sleep(0.2)
    rooms = [torch.empty(5) for _ in range(6)]
    works = [line.receive(room, other, 3) for room in rooms]
    for work in reversed(works):
        line.wait(work, "one of six", other)
    return {"seen": [float(room[0]) for room in rooms]}


def other_size(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A message of another size than was expected."""
    line, other = _line(payload, context), 1 - context.rank
    if line.rank == 0:
        line.send(torch.zeros(4), other, 1)
        return {}
    try:
        line.wait(line.receive(torch.empty(5), other, 1), "a message", other)
    except RuntimeError as error:
        return {"says": str(error)}
    return {"says": ""}


def lost(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The sender is killed; whoever waits for it, or for room, is told soon."""
    line, other = _line(payload, context), 1 - context.rank
    if line.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        if payload["how"] == "room":
            line.send(torch.zeros(2 * 10**6), other, 1)
        else:
            line.wait(line.receive(torch.empty(5), other, 1), "a message", other)
    except (PeerLost, RuntimeError) as error:
        return {"says": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - began}
    return {"says": ""}


def no_room(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Without shared memory messages go over Gloo."""
    from stretto.comm.members import Members

    def refuse(self: Members, num_bytes: int) -> torch.Tensor:
        raise Unavailable("a planted condition")

    Members.shared_memory = refuse  # type: ignore[method-assign]
    return crossing(payload, context)
