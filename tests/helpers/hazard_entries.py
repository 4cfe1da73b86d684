"""What the workers of tests/dist/test_launch_hazards.py do."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from stretto.errors import PeerLost
from stretto.launch import WorkerContext

Payload = dict[str, Any]
LINES = 200
WIDTH = 3000  # more than fits into what the system hands on in one piece


def talkative(payload: Payload, context: WorkerContext) -> None:
    """Every rank prints many long lines at once; then rank 2 fails, a little later rank 1; the others hear of it."""
    broken = threading.Event()
    context.control.on_break(broken.set)
    for number in range(LINES):
        stream = sys.stdout if number % 2 else sys.stderr
        print(f"rank {context.rank} line {number} {str(context.rank) * WIDTH} end", file=stream)
    if context.rank == 2:
        raise ValueError("the first cause")
    if context.rank == 1:
        time.sleep(0.3)
        raise RuntimeError("a later cause")
    assert broken.wait(30)
    raise PeerLost("the group was broken")


def deaf_while_others_wait(payload: Payload, context: WorkerContext) -> None:
    """Rank 0 sleeps in a loop of Python's and hears nothing; the others sleep in a collective."""
    import torch

    from stretto.comm.group import Group, Rendezvous

    group = Group(Rendezvous(context.epoch.store, context.epoch.number, context.rank, context.world_size))
    context.control.send({"kind": "ready", "pid": os.getpid()})
    while context.rank == 0:
        time.sleep(0.05)
    group.all_reduce(torch.ones(4))


def own_loop(payload: Payload, context: WorkerContext) -> dict[str, Any]:
    """A loop of a user's own, with a hook that only rank 0 follows; ``fails``: it raises there after step 2."""
    from stretto.training import start

    run = start(payload["task"], plan="dp=2", run=payload["run"])

    def hook(step: int) -> None:
        if context.rank:
            return
        run.log(seen=step)
        time.sleep(0.05)
        if payload["fails"] and step == 2:
            raise ArithmeticError("in a hook of rank 0")

    for batch in run.batches():
        hook(run.step(batch).step)
    return run.finish()
