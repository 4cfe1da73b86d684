"""The arms of the memory benchmark: what each worker of a job does."""

from __future__ import annotations

from typing import Any

import torch
from hand_written import loop, samples, shard
from torch import nn

from stretto.launch.context import WorkerContext
from stretto.observe import peak_rss_bytes
from stretto.plan import Plan
from stretto.task import load_task
from stretto.training import form_group


def _model(task: Any, how: str) -> nn.Module:
    """``real``: built whole on every rank. ``meta``: built without memory, as FSDP2's notes advise for large models."""
    torch.manual_seed(0)
    if how == "real":
        return task.model()  # type: ignore[no-any-return]
    with torch.device("meta"):
        return task.model()  # type: ignore[no-any-return]


def fsdp2(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Hand-written FSDP2 for a few steps."""
    task = load_task(payload["task"], payload["sets"])
    group = form_group(Plan.parse(payload["plan"]), context)
    model = shard(_model(task, payload["how"]), group)
    if payload["how"] == "meta":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
    step = loop(task, model, samples(task.data()["train"], task.recipe.batch, group), group, float(group.size))
    for _ in range(payload["steps"]):
        step()
    return {"peak_bytes": int(group.maximum(float(peak_rss_bytes(group.size) - context.imports_rss_bytes)))}
