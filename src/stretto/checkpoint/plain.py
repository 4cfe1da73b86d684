"""State that is no tensor, as JSON that comes back as it was: JSON alone turns the keys of a mapping into text."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from stretto.errors import CheckpointError


def json_only(value: Any, what: str) -> Any:
    """A private copy of ``value``. Raises CheckpointError where it isn't JSON; ``what`` names it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be JSON to be kept in a checkpoint: {error}") from error


def pack(value: Any, what: str) -> Any:
    """``value`` as JSON; mappings with other keys than text, counters and tuples are tagged.

    Raises:
        CheckpointError: it holds something that JSON can't; ``what`` names it.
    """
    if isinstance(value, Counter):
        return {"__counter__": [[pack(key, what), count] for key, count in value.items()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: pack(entry, what) for key, entry in value.items()}
        return {"__pairs__": [[pack(key, what), pack(entry, what)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(entry, what) for entry in value]}
    if isinstance(value, list):
        return [pack(entry, what) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:  # a number as a tensor or a NumPy scalar
        return value.item()
    raise CheckpointError(f"{what} holds a {type(value).__name__}, which a checkpoint can't keep as JSON")


def unpack(value: Any) -> Any:
    """The inverse of :func:`pack`; numbers that were tensors stay plain numbers."""
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "__counter__" in value:
        return Counter({unpack(key): count for key, count in value["__counter__"]})
    if "__pairs__" in value:
        return {unpack(key): unpack(entry) for key, entry in value["__pairs__"]}
    if "__tuple__" in value:
        return tuple(unpack(entry) for entry in value["__tuple__"])
    return {key: unpack(entry) for key, entry in value.items()}
