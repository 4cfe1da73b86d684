"""Element types by name: ``"float32"`` stands for ``torch.float32``, to say it in plain files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from stretto.errors import nearest

if TYPE_CHECKING:
    import torch

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
        "int16": 2,
        "uint32": 4,
        "int32": 4,
        "uint64": 8,
        "int64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Bytes of one element of every type a state may hold."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: the type is none that a state may hold.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        valid = ", ".join(ITEM_BYTES)
        raise ValueError(
            f"a state cannot hold elements of type {dtype!r}{nearest(dtype, ITEM_BYTES)}; it can hold {valid}"
        ) from None


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``; only names of the table reach torch's namespace."""
    import torch

    item_bytes(name)
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
