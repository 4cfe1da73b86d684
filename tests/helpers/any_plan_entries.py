"""Entries of the tests of checkpoints between any two plans: each runs in every worker, and returns plain JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.assemble import assemble, build_template, disassemble
from stretto.checkpoint import CheckpointWriter, Snapshot, open_checkpoint, snapshot_slices
from stretto.launch.context import WorkerContext
from stretto.plan import Plan
from stretto.task import load_task
from stretto.training import form_group


def resaved(payload: dict[str, Any], context: WorkerContext) -> None:
    """Loads a checkpoint under a plan and saves it again, as it is, in another folder."""
    task, plan = load_task(payload["task"], payload["sets"]), Plan.parse(payload["plan"])
    checkpoint = open_checkpoint(Path(payload["checkpoint"]))
    on = assemble(task, plan, build_template(task), form_group(plan, context), checkpoint)
    on.optimizer.load_hyperparameters(checkpoint.meta["groups"])
    on.optimizer.import_state(checkpoint, checkpoint.meta["scalars"])
    slices = snapshot_slices([*on.applied.export_state(), *on.optimizer.export_state()])
    writer = CheckpointWriter(Path(payload["folder"]))
    members = context.epoch.members
    writer.save(Snapshot(checkpoint.step, "t", context.member, members, context.rank == 0, slices))
    writer.wait()
    on.group.barrier()
    disassemble(on)
