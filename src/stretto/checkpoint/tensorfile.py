"""One safetensors file: written by hand, so that it can be flushed; read by the library, lazily.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes of header length, little-endian, a
JSON header, the data. Complex numbers are stored as pairs of reals (a last dimension of 2): the format
has no complex128; the manifest keeps the true element type.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import safe_open

from stretto.state import TensorSpec
from stretto.state.dtypes import dtype_name

_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
    }
)
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file ready to be written: header, and the bytes of each tensor in file order."""

    header: bytes
    arrays: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(array.nbytes for array in self.arrays)

    @property
    def header_digest(self) -> str:
        """Guards the header; the tensors' own digests guard the rest."""
        return _header_digest(self.header)


def encode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Encoded:
    """The file for tensors by key. Views, not copies, of contiguous tensors on the CPU."""
    stored = {key: _as_stored(tensor) for key, tensor in tensors.items()}
    # Readers view the mapped file as elements, so each tensor must begin at a multiple of its element's size.
    keys = sorted(stored, key=lambda key: (-tensors[key].element_size(), key))
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for key in keys:
        tensor = stored[key]
        end = begin + tensor.numel() * tensor.element_size()
        code = _CODES[dtype_name(tensor.dtype)]
        entries[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 16)
    solid = (stored[key].reshape(-1) for key in keys if stored[key].numel())
    arrays = tuple(tensor.view(torch.uint8).numpy().data for tensor in solid)
    return Encoded(len(text).to_bytes(8, "little") + text, arrays)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes every byte, in chunks that give way to other threads."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]


def split_half(arrays: Sequence[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """The same bytes in order, as a first and a second half."""
    half = sum(array.nbytes for array in arrays) // 2
    first: list[memoryview] = []
    second: list[memoryview] = []
    for array in arrays:
        first.append(array[:half])
        second.append(array[half:])
        half -= min(half, array.nbytes)
    return first, second


def read_header_digest(path: Path) -> str:
    """The digest of a file's header; of the whole file where the header's length makes no sense."""
    with path.open("rb") as file:
        start = file.read(8)
        return _header_digest(start + file.read(min(int.from_bytes(start, "little"), path.stat().st_size)))


class TensorFile:
    """A file opened for reading; nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(str(path), framework="pt")

    def view(self, key: str, spec: TensorSpec) -> torch.Tensor:
        """A whole stored tensor of the spec's type; a view of the mapped file, not to be kept."""
        return _from_stored(self._file.get_tensor(key), spec)  # type: ignore[no-untyped-call]

    def read(self, key: str, spec: TensorSpec, index: tuple[slice, ...]) -> torch.Tensor:
        """A rectangular part of a stored tensor; only that part is read."""
        if not index:
            return self.view(key, spec)
        # The library wants each dimension named, the last one of a complex tensor too.
        bounds = (*index, slice(0, 2)) if spec.dtype.startswith("complex") else index
        part = self._file.get_slice(key)[bounds]  # type: ignore[no-untyped-call]
        return _from_stored(part, spec)


def _header_digest(header: bytes) -> str:
    return hashlib.blake2b(header, digest_size=8).hexdigest()


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _from_stored(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.dtype.startswith("complex"):
        tensor = torch.view_as_complex(tensor.contiguous())
        # The format promises 8 bytes of alignment; a complex128 that is not on 16 ends the process.
        if tensor.data_ptr() % tensor.element_size():
            tensor = torch.view_as_complex(torch.view_as_real(tensor).clone())
    if dtype_name(tensor.dtype) != spec.dtype:
        raise ValueError(f"expected elements of type {spec.dtype}, the file has {dtype_name(tensor.dtype)}")
    return tensor
