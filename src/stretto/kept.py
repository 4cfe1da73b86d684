"""What a checkpoint holds of a step's machinery beside tensors: JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stretto.checkpoint import Checkpoint, pack, unpack
from stretto.data import Generators
from stretto.machinery import Machinery
from stretto.precision import LossScale
from stretto.step import Stepper


def kept_of(on: Machinery, stepper: Stepper) -> dict[str, Any]:
    """The machinery's entries for a checkpoint's meta. Every rank must call it, as each knows its own parameters'."""
    scalars: dict[str, Any] = {}
    for theirs in on.group.gather_json(on.optimizer.scalars()):
        scalars |= theirs
    return {
        "nominal_weight": stepper.nominal_weight,
        "loss_scale": None if stepper.scale is None else asdict(stepper.scale),
        "generators": Generators.remember().to_json(),
        "schedule": None if on.schedule is None else pack(on.schedule.state_dict(), "the schedule's state"),
        "groups": on.optimizer.hyperparameters(),
        "scalars": scalars,
    }


def restore(checkpoint: Checkpoint, on: Machinery, stepper: Stepper) -> None:
    """The inverse: fills optimizer, schedule, stepper and generators. Raises CheckpointError where they don't fit."""
    meta = checkpoint.meta
    on.optimizer.load_hyperparameters(meta["groups"])
    on.optimizer.import_state(checkpoint, meta["scalars"])
    if on.schedule is not None and meta["schedule"] is not None:
        on.schedule.load_state_dict(unpack(meta["schedule"]))
    stepper.nominal_weight = meta["nominal_weight"]
    if stepper.scale is not None and (kept := meta.get("loss_scale")) is not None:
        stepper.scale = LossScale(**kept)
    Generators.from_json(meta["generators"]).restore()
