"""Names inside ``RUN/checkpoints``: what is a checkpoint, what is unfinished or left over.

A checkpoint is ``step-00000100``. Hidden folders ``.step-00000100.KIND-TOKEN`` are of three kinds:
``partial`` (being written), ``replaced`` (moved aside by a new save of the same step) and ``pruned`` (being
deleted).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MANIFEST: Final = "manifest.json"

_WORD = "[A-Za-z0-9][A-Za-z0-9._-]*"
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_HIDDEN = re.compile(rf"\.step-([0-9]{{8,}})\.(partial|replaced|pruned)-({_WORD})")
_DATA_FILE = re.compile(rf"member-{_WORD}\.safetensors")


@dataclass(frozen=True, slots=True)
class Hidden:
    """A hidden folder: its step, kind and the token of the save that made it."""

    path: Path
    step: int
    kind: str
    token: str


def is_word(text: str) -> bool:
    """Whether a member id or token may be part of a file name."""
    return re.fullmatch(_WORD, text) is not None


def step_name(step: int) -> str:
    """``100`` -> ``"step-00000100"``."""
    return f"step-{step:08d}"


def hidden_name(step: int, kind: str, token: str) -> str:
    """``".step-00000100.partial-TOKEN"``."""
    return f".{step_name(step)}.{kind}-{token}"


def data_name(member: str) -> str:
    """The file with a member's tensors."""
    return f"member-{member}.safetensors"


def report_name(member: str) -> str:
    """The file in which a member tells the committer what it wrote."""
    return f"member-{member}.json"


def failed_name(member: str) -> str:
    """The file in which a member tells the committer that it could not write."""
    return f"member-{member}.failed"


def is_data_name(name: str) -> bool:
    """Whether a manifest may name this file: a member's data beside the manifest, and nothing elsewhere."""
    return _DATA_FILE.fullmatch(name) is not None


def step_of(path: Path) -> int | None:
    """The step in a folder's name, hidden or not; None for other names."""
    match = _CHECKPOINT.fullmatch(path.name) or _HIDDEN.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints of ``RUN/checkpoints``, newest first, whole or damaged.

    A folder that was moved aside counts while its step has no other: the save that was to take its place died
    between two renames.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    steps = {step_of(path) for path in found}
    found += [h.path for h in list_hidden(folder) if h.kind == "replaced" and h.step not in steps]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name), reverse=True)


def list_hidden(folder: Path) -> list[Hidden]:
    """The hidden folders, by name."""
    if not folder.is_dir():
        return []
    matches = ((path, _HIDDEN.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [Hidden(path, int(m[1]), m[2], m[3]) for path, m in matches if m]
