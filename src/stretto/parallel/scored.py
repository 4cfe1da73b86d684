"""The graph that a training step runs: the model's, and with ``tp`` the loss's too.

With the loss in it the logits are an inner value, which may lie in parts on the ranks (:mod:`stretto.graph.classes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from stretto.errors import Refused
from stretto.graph.trace import Traced, trace
from stretto.parallel._base import Example
from stretto.plan import Plan


def trace_step(
    module: nn.Module, example: Example, plan: Plan, unlike: Callable[[Traced], str]
) -> tuple[Traced, str]:
    """What training runs under a plan: with ``tp`` the model traced with its loss, or without, and why; else without.

    Args:
        unlike: why a graph isn't what it is a trace of, or nothing.

    Raises:
        Refused: the model can't be traced, or the graph computes something else.
    """
    why = ""
    if plan.tp > 1:
        scored, why = _with_loss(module, example, plan.line, unlike)
        if scored is not None:
            return scored, ""
    traced = trace(module, *example.call, surround=example.surround)
    if said := unlike(traced):
        raise Refused(f"plan {plan}: {said}")
    return traced, why


def _with_loss(
    module: nn.Module, example: Example, stages: int, unlike: Callable[[Traced], str]
) -> tuple[Traced | None, str]:
    """The model traced with its loss; or None, and why."""
    if example.scoring is None:
        return None, example.why_not
    try:
        traced = trace(module, *example.call, example.scoring, example.surround)
        why = _left_out(traced, module, example) if stages > 1 else ""
        why = why or unlike(traced)
    except Refused as error:
        why = str(error)
    return (None, why) if why else (traced, "")


def _left_out(traced: Traced, module: nn.Module, example: Example) -> str:
    """What forward uses and the loss doesn't: no stage of a graph with the loss would have it for an evaluation."""
    idle = _idle(traced)
    more = idle - _idle(trace(module, *example.call, surround=example.surround)) if idle else set()
    return f"the loss doesn't depend on {min(more)}, which forward uses" if more else ""


def _idle(traced: Traced) -> set[str]:
    nodes = traced.graph.graph.nodes
    used = {traced.parameters[node.name] for node in nodes if node.name in traced.parameters and node.users}
    return set(traced.parameters.values()) - used


def unseen(batch: Any, name: str = "batch") -> str:
    """What of a batch a trace would take for a constant, though another batch may have another; empty: nothing."""
    if batch is None or isinstance(batch, torch.Tensor):
        return ""
    parts: Mapping[Any, Any] | None = None
    if isinstance(batch, Mapping):
        parts = batch
    elif isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        parts = dict(enumerate(batch))
    elif dataclasses.is_dataclass(batch):
        parts = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if parts is None:
        return f"{name} is a {type(batch).__name__}, which a trace of the loss would take for a constant"
    return next(filter(None, (unseen(value, f"{name}[{key!r}]") for key, value in parts.items())), "")
