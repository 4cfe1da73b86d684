"""Shapes, cuts and states for the tests of state/ and checkpoint/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from stretto.checkpoint import CheckpointWriter, Snapshot
from stretto.state import Box, MemorySource, Slice
from stretto.state.dtypes import ITEM_BYTES, torch_dtype

DTYPES = tuple(ITEM_BYTES)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """0 to 4 dimensions of 0 to 6."""
    return st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a shape: cut in two along one dimension, up to seven times; some are empty."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 7)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.starts[axis], box.stops[axis]))
        stops = (*box.stops[:axis], at, *box.stops[axis + 1 :])
        starts = (*box.starts[:axis], at, *box.starts[axis + 1 :])
        boxes += [Box(box.starts, stops), Box(starts, box.stops)]
    return draw(st.permutations(boxes))


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs with payloads included; of a bool only 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = Box.whole(shape).numel * ITEM_BYTES[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(torch_dtype(dtype)).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes in C order: NaNs compare, and -0.0 is not 0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def cut_slices(source: MemorySource, name: str, boxes: list[Box]) -> list[Slice]:
    """Owner slices of one tensor."""
    spec = source.spec(name)
    return [Slice(spec, box, source.read(name, box), owner=True) for box in boxes]


def row_slices(tensors: dict[str, torch.Tensor], index: int, num: int) -> tuple[Slice, ...]:
    """What member ``index`` of ``num`` owns: rows of matrices; scalars and empty tensors at member 0."""
    source, owned = MemorySource(tensors), []
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows:
            starts = (rows * index // num, *(0 for _ in tensor.shape[1:]))
            stops = (rows * (index + 1) // num, *tensor.shape[1:])
            owned += cut_slices(source, name, [Box(starts, stops)])
        elif index == 0:
            owned += cut_slices(source, name, [Box.whole(tensor.shape)])
    return tuple(owned)


def state_of_step(step: int) -> dict[str, torch.Tensor]:
    """A small state in which every value tells its step."""
    return {
        "model/weight": torch.arange(35, dtype=torch.float32).reshape(7, 5) + step,
        "model/half": torch.full((6, 3), float(step % 256), dtype=torch.bfloat16),
        "model/none": torch.empty(0, 3),
        "optimizer/main/weight/step": torch.tensor(float(step)),
        "generator/torch": torch.arange(64, dtype=torch.uint8) + step % 100,
    }


def snapshots(step: int, num_members: int = 1, token: str = "t1", **meta: Any) -> list[Snapshot]:
    """One snapshot a member of the state of a step; the first member commits."""
    members = tuple(f"m{index + 1}" for index in range(num_members))
    tensors = state_of_step(step)
    return [
        Snapshot(step, token, name, members, index == 0, row_slices(tensors, index, num_members), meta)
        for index, name in enumerate(members)
    ]


def save(folder: Path, step: int, num_members: int = 1, keep: int = 100, **meta: Any) -> Path:
    """A committed checkpoint of the state of a step."""
    token = f"save{step}"
    writers = [CheckpointWriter(folder, keep) for _ in range(num_members)]
    for writer, snapshot in zip(writers, snapshots(step, num_members, token, **meta), strict=True):
        writer.save(snapshot)
    for writer in writers:
        writer.wait()
    return folder / f"step-{step:08d}"
