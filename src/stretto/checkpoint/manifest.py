"""The two JSON files of a checkpoint: a member's report to the committer, and the manifest.

Both are parsed strictly (no unknown field, no coercion). The manifest ends with a checksum over its own text.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stretto.checkpoint.names import is_data_name
from stretto.errors import one_line
from stretto.state import Box, TensorSpec

Count = Field(ge=0)
Hex = Field(pattern=r"^[0-9a-f]{16}$")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """A data file: its size, and the digest of its header."""

    num_bytes: int = Count
    header: str = Hex


class PieceEntry(_Strict):
    """Where one box of a tensor lies: file and key, with the box's partial digest."""

    file: str
    key: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    partial: str = Hex

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.box()
        return self

    def box(self) -> Box:
        """The box in logical indices."""
        return Box(self.starts, self.stops)


class TensorEntry(_Strict):
    """A logical tensor: type, shape, digest of the whole (empty in a report), pieces."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    pieces: tuple[PieceEntry, ...]

    def spec(self, name: str) -> TensorSpec:
        """The logical tensor."""
        return TensorSpec(name, self.shape, self.dtype)


class Report(_Strict):
    """What one member wrote: one file, and its pieces of each tensor."""

    format: Literal["stretto-checkpoint-member"] = "stretto-checkpoint-member"
    version: Literal[1] = 1
    step: int = Count
    token: str
    member: str
    file: FileEntry
    tensors: dict[str, TensorEntry]


class Manifest(_Strict):
    """A whole checkpoint. ``meta`` is whatever JSON the saver keeps beside the tensors."""

    format: Literal["stretto-checkpoint"] = "stretto-checkpoint"
    version: Literal[1] = 1
    step: int = Count
    token: str
    members: tuple[str, ...]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    meta: dict[str, Any]
    checksum: str = Hex

    @model_validator(mode="after")
    def _check(self) -> Self:
        for file in self.files:
            if not is_data_name(file):
                raise ValueError(f"{file!r} is not a data file of this folder")
        for name, tensor in self.tensors.items():
            tensor.spec(name)
            for piece in tensor.pieces:
                if piece.file not in self.files:
                    raise ValueError(f"{name}: the file {piece.file} is not listed")
        return self


def dump_manifest(
    step: int,
    token: str,
    members: tuple[str, ...],
    files: dict[str, FileEntry],
    tensors: dict[str, TensorEntry],
    meta: dict[str, Any],
) -> str:
    """The text of ``manifest.json``."""
    manifest = Manifest(
        step=step, token=token, members=members, files=files, tensors=tensors, meta=meta, checksum="0" * 16
    )
    body = manifest.model_dump()
    del body["checksum"]
    return _text({**body, "checksum": _checksum(body)})


def parse_manifest(text: str) -> Manifest:
    """The manifest, when every byte of it is as written.

    Raises:
        ValueError: with one line that says what is wrong.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON ({one_line(error)})") from None
    if not isinstance(content, dict) or content.get("format") != "stretto-checkpoint":
        raise ValueError("is not a checkpoint's manifest")
    if content.get("version") != 1:
        raise ValueError(f"has version {content.get('version')!r}; this program reads version 1")
    body = {key: value for key, value in content.items() if key != "checksum"}
    # Written again it must give the same text: so an altered byte is seen even where it alters no value.
    if content.get("checksum") != _checksum(body) or _text(content) != text:
        raise ValueError("was altered (its checksum does not match)")
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise ValueError(f"is not valid at {where}: {one_line(first['msg'])}") from None
    # pydantic reads special floats and long integers by its own rules; the saver's JSON comes back as
    # Python reads it.
    return manifest.model_copy(update={"meta": content["meta"]})


def dump_report(report: Report) -> str:
    """The text of ``member-ID.json``."""
    return _text(report.model_dump())


def parse_report(text: str) -> Report:
    """A member's report; ValueError when it is not one."""
    return Report.model_validate_json(text)


def private_json(meta: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``meta`` as it will be read again.

    Raises:
        TypeError: it holds what JSON cannot.
    """
    copy = json.loads(json.dumps(meta))
    assert isinstance(copy, dict)
    return copy


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(_text(body).encode(), digest_size=8).hexdigest()
