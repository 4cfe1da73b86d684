"""What the workers of tests/dist/test_watch.py do: they train, and rank 1 makes other calls than the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stretto.comm import shm_segment
from stretto.data import BatchHandle
from stretto.launch import WorkerContext
from stretto.parallel.pipeline import Execution, Message
from stretto.schedule import Kind
from stretto.step import Stepper
from stretto.sync.exact import ExactSum
from stretto.testing.conditions import no_free_memory
from stretto.training import work

Finish = Callable[[ExactSum], None]


def shared(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Trains over shared memory."""
    return _work(payload, context)


def gloo(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Trains over Gloo."""
    with mock.patch.object(shm_segment, "available", lambda: "a test wants Gloo"):
        return _work(payload, context)


def _work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    how = payload["sets"]["how"]
    with ExitStack() as stack:
        if how == "unsent" and context.rank == 0:
            _unsent(stack)
        if how == "fewer":
            no_free_memory(context.rank)  # so that each microbatch sends its gradients
        if how == "skip" and context.rank != 1:
            _order(stack)
        if how in PLANTED and context.rank == 1:
            PLANTED[how](stack)
        return work(payload, context)


def _shape(stack: ExitStack) -> None:
    """It calls with a tensor of its own before it reduces its gradients in step 3."""
    _at_the_third(stack, lambda real, sync: (dist.all_reduce(torch.ones(1000)), real(sync)))


def _order(stack: ExitStack) -> None:
    """It waits for all at a barrier before it reduces its gradients in step 3."""
    _at_the_third(stack, lambda real, sync: (dist.barrier(), real(sync)))


def _at_the_third(stack: ExitStack, instead: Callable[[Finish, ExactSum], Any]) -> None:
    calls, real = count(1), ExactSum.finish

    def finish(sync: ExactSum) -> None:
        if next(calls) == 3:
            instead(real, sync)
        else:
            real(sync)

    stack.enter_context(mock.patch.object(ExactSum, "finish", finish))


def _fewer(stack: ExitStack) -> None:
    """It runs one microbatch less in step 3."""
    real = Stepper.pieces

    def pieces(stepper: Stepper, batch: BatchHandle) -> Any:
        found = real(stepper, batch)
        return found[:-1] if batch.step == 3 else found

    stack.enter_context(mock.patch.object(Stepper, "pieces", pieces))


def _unsent(stack: ExitStack) -> None:
    """It does not send the second microbatch of step 3 on to the next stage."""
    calls, real = count(1), Execution._send

    def send(self: Execution, message: Message, values: Any) -> None:
        if message.kind is Kind.FORWARD and message.microbatch == 1 and next(calls) == 3:
            return
        real(self, message, values)

    stack.enter_context(mock.patch.object(Execution, "_send", send))


PLANTED = {"shape": _shape, "order": _order, "fewer": _fewer}
