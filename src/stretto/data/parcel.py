"""A batch on its way from a loader to its rank: anonymous files in memory, whose descriptors are handed over.

Not the shared memory that torch uses: that lies in /dev/shm, which containers keep small and which kills by SIGBUS when
it is full, and it holds a descriptor open for every tensor that is kept. Here a write that finds no room is an error,
large tensors are mapped and their descriptors closed at once, and small ones are copied.

This is the one place that unpickles: what a process of ours, forked from this one, has written for it alone.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy
import torch

MAX_FILES: Final = 5  # the kernel counts descriptors that are under way, for each user
_LARGE_BYTES: Final = 256 << 10
_HEAD: Final = 8  # bytes of the number that stands first: the length of the table
_CHUNK: Final = 1 << 30  # Linux moves at most 2 GiB in one call


class _Pickler(pickle.Pickler):
    """Takes the memory of tensors and of NumPy's arrays out of the pickle, uncopied."""

    def reducer_override(self, value: Any) -> Any:
        """How a plain tensor is told; anything else tells itself."""
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
        if not plain or value.requires_grad or value.__dict__:
            return NotImplemented
        value = value.resolve_conj().resolve_neg()
        # By falling stride, so that a transposed or channels-last batch is laid out over there as it is here: kernels
        # may differ in the last bit between layouts.
        order = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
        packed = value.permute(order)
        if not packed.is_contiguous():
            order, packed = list(range(value.ndim)), value.contiguous()
        cells = packed.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(cells), value.dtype, tuple(packed.shape), tuple(order))


def _tensor(cells: Any, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    flat = torch.from_numpy(numpy.asarray(cells))
    whole = flat.view(dtype).view(shape) if len(flat) else torch.empty(shape, dtype=dtype)
    return whole.permute([order.index(dim) for dim in range(len(order))])


def pack(tree: Any) -> list[int]:
    """Writes ``tree`` into one or more new files in memory. Returns their descriptors, which the caller closes.

    Raises:
        OSError: no room, or no descriptor is left.
        Exception: whatever an object raises that can't be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _Pickler(text, 5, buffer_callback=buffers.append).dump(tree)
    parts = [buffer.raw() for buffer in buffers]
    large = sorted(range(len(parts)), key=lambda index: -parts[index].nbytes)[: MAX_FILES - 1]
    alone = {index for index in large if parts[index].nbytes >= _LARGE_BYTES}
    table = [(part.nbytes, index in alone) for index, part in enumerate(parts)]
    head = pickle.dumps((table, len(text.getbuffer())))
    together = [part for index, part in enumerate(parts) if index not in alone]
    first: list[Any] = [len(head).to_bytes(_HEAD, "little"), head, text.getbuffer(), *together]
    files: list[int] = []
    try:
        for content in (first, *([parts[index]] for index in sorted(alone))):
            files.append(os.memfd_create("stretto-samples"))
            for part in content:
                _all_of(memoryview(part).cast("B"), lambda piece, _: os.write(files[-1], piece))
    except BaseException:
        close(files)
        raise
    return files


def unpack(files: Sequence[int]) -> Any:
    """What :func:`pack` has written; the descriptors may be closed afterwards."""
    first, *others = files
    place = _HEAD + int.from_bytes(os.pread(first, _HEAD, 0), "little")
    table, length = pickle.loads(os.pread(first, place - _HEAD, _HEAD))
    text = bytearray(length)
    _read(first, memoryview(text), place)
    place += length
    buffers: list[Any] = []
    for size, alone in table:
        if alone:
            path = f"/proc/self/fd/{others.pop(0)}"
            cells: Any = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
        else:
            cells = torch.empty(size, dtype=torch.uint8).numpy()  # torch's allocator aligns it for torch's kernels
            _read(first, memoryview(cells), place)
            place += size
        buffers.append(cells)
    return pickle.loads(text, buffers=buffers)


def close(files: Sequence[int]) -> None:
    """Closes the descriptors of a parcel."""
    for fd in files:
        os.close(fd)


def _read(fd: int, into: memoryview, place: int) -> None:
    _all_of(into, lambda part, done: os.preadv(fd, [part], place + done))


def _all_of(view: memoryview, move: Callable[[memoryview, int], int]) -> None:
    done = 0
    while done < len(view):
        moved = move(view[done : done + _CHUNK], done)
        if not moved:
            raise EOFError(f"a parcel of samples ends after {done} of {len(view)} bytes")
        done += moved
