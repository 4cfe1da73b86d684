"""Weights in one plain file, for use without this library.

The file is safetensors: tensors under the names of the user's own module, as ``state_dict()`` has them, whatever the
plan was. The format holds no tensor twice, so one with several names (tied weights) stands under the first;
the others are listed in the file's metadata, and :func:`load_weights` gives them their tensor back.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stretto.checkpoint import Checkpoint, list_checkpoints, newest_whole, open_checkpoint
from stretto.checkpoint.names import step_of
from stretto.errors import CheckpointError, nearest, one_line
from stretto.state import Box

if TYPE_CHECKING:
    from torch import nn

MODEL: Final = "model/"


def weight_names(module: nn.Module) -> dict[str, Any]:
    """What a checkpoint must keep to name weights as ``module.state_dict()`` does, as JSON.

    Returns:
        ``aliases``: further names of a tensor, with its first; ``left_out``: buffers that a state dict leaves out.
    """
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    keys = {key: first[id(value)] for key, value in module.state_dict(keep_vars=True).items() if id(value) in first}
    kept = set(keys.values())
    return {
        "aliases": {key: name for key, name in keys.items() if key != name},
        "left_out": [name for name in first.values() if name not in kept],
    }


@dataclass(frozen=True)
class Exported:
    """What was written: where, of which step, how many tensors, further names, and bytes."""

    path: Path
    step: int
    num_tensors: int
    aliases: dict[str, str]
    num_bytes: int


def find_checkpoint(run: Path, step: int | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint of a run, or that of ``step``, read and compared with its digests; and notes.

    Raises:
        CheckpointError: there is none, none of that step, or it is damaged.
    """
    folder = run / "checkpoints"
    if step is None:
        return newest_whole(folder)
    found = {step_of(path): path for path in reversed(list_checkpoints(folder))}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{run} holds no checkpoint of step {step}; there is {there}")
    checkpoint = open_checkpoint(found[step])
    checkpoint.verify()
    return checkpoint, []


def export_weights(checkpoint: Checkpoint, path: Path) -> Exported:
    """Writes the weights of a checkpoint into one file, which takes the place of one that is there.

    Complex numbers are written as pairs of reals, a last dimension of 2, as the format has no complex128.

    Raises:
        CheckpointError: the file can't be written.
    """
    from stretto.checkpoint.tensorfile import encode, write_all

    weights = checkpoint.meta.get("weights", {"aliases": {}, "left_out": []})
    left_out = {MODEL + name for name in weights["left_out"]}
    tensors = {
        full.removeprefix(MODEL): checkpoint.read(full, Box.whole(checkpoint.spec(full).shape))
        for full in checkpoint.names()
        if full.startswith(MODEL) and full not in left_out
    }
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    told = {"step": checkpoint.step, "aliases": weights["aliases"], "complex": pairs}
    encoded = encode(tensors, {"format": "pt", "stretto": json.dumps(told)})
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb", buffering=0) as file:
            write_all(file.fileno(), encoded.header)
            for array in encoded.arrays:
                write_all(file.fileno(), array)
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return Exported(path, checkpoint.step, len(tensors), weights["aliases"], encoded.num_bytes)


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fills a plain module from an exported file; tied weights stay tied. Needs no run and no group.

    Raises:
        CheckpointError: the file can't be read, or its tensors are not the module's: one is missing, left over, or of
            another shape.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            told = json.loads((file.metadata() or {}).get("stretto", "{}"))
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {one_line(error)}") from error
    for name in told.get("complex", []):
        found[name] = torch.view_as_complex(found[name])
    found |= {alias: found[name] for alias, name in told.get("aliases", {}).items() if name in found}
    wanted = module.state_dict()
    for name, tensor in wanted.items():
        if name not in found:
            raise CheckpointError(f"{path}: the model's {name!r} is not in it{nearest(name, found)}")
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)} in it, {list(tensor.shape)} in the model"
            raise CheckpointError(f"{path}: {name!r} is {shapes}")
    if extra := [name for name in found if name not in wanted]:
        raise CheckpointError(f"{path}: it has {extra[0]!r}, which the model does not{nearest(extra[0], wanted)}")
    module.load_state_dict(found)
