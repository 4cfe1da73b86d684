"""A line of a file of published measurements: which fields it has, and of what kind each must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stretto.errors import UserError, one_line


def _number(value: Any) -> Any:
    """A number, not one in words: what is written as text may mean anything, so nothing is made of it."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("no number")
    return value


_MOST = 10**9  # of anything that is counted
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=_MOST)]
Number = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e18)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Model(_Part):
    """What was trained."""

    name: str
    layers: Count
    hidden: Count
    ffn: Count
    heads: Count | None = None
    kv_heads: Count | None = None
    vocab: Count | None = None
    mlp: str | None = None
    tied_embeddings: bool | None = Field(None, strict=True)
    pos: str | None = None


class Hardware(_Part):
    """On what."""

    gpu: str
    count: Count
    per_node: Count | None = None
    inter: str | None = None


class Parallel(_Part):
    """The plan. ``zero_group``: ranks of dp that ``zero`` cuts over; -1: all."""

    dp: Count
    tp: Count
    pp: Count
    cp: Count | None = 1
    ep: Count | None = 1
    zero: Annotated[int, BeforeValidator(_number), Field(ge=0, le=3)] | None = None
    zero_group: Annotated[int, BeforeValidator(_number), Field(ge=-1, le=_MOST)] | None = None
    interleave: Count | None = None
    sp: bool | None = Field(None, strict=True)
    schedule: str | None = None
    stage_layers: list[int] | None = None
    async_tp: bool | None = Field(None, strict=True)

    @property
    def world_size(self) -> int:
        """Devices that it takes."""
        return self.dp * self.tp * self.pp * (self.cp or 1)

    @property
    def shard(self) -> int:
        """Ranks of dp that ``zero`` cuts over."""
        return self.zero_group if self.zero_group and self.zero_group > 0 else self.dp


class Batch(_Part):
    """Samples."""

    micro: Count
    seq: Count
    samples: Count = Field(alias="global")
    grad_accum: Count | None = None


class Result(_Part):
    """What was measured. ``status``: why there is nothing."""

    iter_s: Number | None = None
    mem_gb: Number | None = None
    mem_gib_max: Number | None = None
    mem_gib_nvidia_smi: Number | None = None
    status: str | None = None


class Row(_Part):
    """All of it."""

    source: str | None = None
    precision: str
    recompute: str
    notes: str | None = None
    model: Model
    hardware: Hardware
    parallel: Parallel
    batch: Batch
    result: Result


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file.

    Raises:
        UserError: the file can't be read, or a line is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without the mark that some editors put first
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{path} can't be read: {why}") from error
    # Not splitlines(), which cuts at characters that JSON lets stand inside a text.
    return [_parse(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")
    return row
