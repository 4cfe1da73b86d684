"""The run folder: plain files that are the truth about a run. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from stretto.errors import UserError, nearest

RESOLVED_NAME: Final = "resolved.yaml"
SUMMARY_NAME: Final = "summary.json"
START_ORIGIN: Final = "start()"  # the origin of a plan in a run whose loop is a script's own


@dataclass(frozen=True)
class Law:
    """Whether a run's plans keep the numbers of one device, as far as the probes can tell; and if not, why."""

    kept: bool = True
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """``resolved.yaml``: what a run was started with, each value with its origin."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    version: int = 1
    name: str
    task: str | None
    settings: dict[str, dict[str, Any]]
    recipe: dict[str, dict[str, Any]]
    plan: dict[str, dict[str, Any]]
    cluster: dict[str, dict[str, Any]]
    law: Law = Law()

    def values(self) -> dict[str, Any]:
        """Settings and recipe fields by name, as ``--set`` would give them."""
        return {key: entry["value"] for part in (self.settings, self.recipe) for key, entry in part.items()}


def create_run_folder(wanted: Path | None, name: str) -> Path:
    """A new run folder: ``wanted``, or the first free one of ``runs/NAME``, ``runs/NAME-2``, ...

    Raises:
        UserError: ``wanted`` holds something already, or can't be made.
    """
    if wanted is not None:
        if (wanted / RESOLVED_NAME).exists():
            raise UserError(f"{wanted} holds a run already: `stretto resume {wanted}`, or give another --run")
        if wanted.is_dir() and any(entry.name != ".lock" for entry in wanted.iterdir()):
            raise UserError(f"{wanted} is not empty and no run; give a new or an empty folder")
        return _make(wanted)
    for number in range(1, 100_000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            _make(folder.parent)
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
    raise UserError(f"runs/{name} and 99,999 more are taken; give --run")


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
    return folder


class FolderLock:
    """Holds a run folder for one process at a time; the kernel lets go when the process ends, however it ends."""

    def __init__(self, run: Path) -> None:
        """Raises UserError where another process holds the folder."""
        try:
            self._fd = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"cannot write to the run folder {run}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise UserError(f"{run} is in use by process {holder}; wait for it, or give another --run") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Lets go."""
        os.close(self._fd)


def write_text(path: Path, text: str) -> None:
    """Writes a file aside, flushes it and renames it into place, so that it is never half there.

    Raises:
        UserError: the disk is full or the folder can't be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Writes ``summary.json``."""
    write_text(run / SUMMARY_NAME, json.dumps(plain_json(dict(summary)), indent=1) + "\n")


def plain_json(value: Any) -> Any:
    """The value with null for what JSON has no number for (NaN, infinities), so that every reader can read it."""
    if isinstance(value, dict):
        return {key: plain_json(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_resolved(run: Path, resolved: Resolved) -> None:
    """Writes ``resolved.yaml``."""
    write_text(run / RESOLVED_NAME, yaml.safe_dump(asdict(resolved), sort_keys=False, allow_unicode=True))


def read_resolved(run: Path) -> Resolved:
    """Reads ``resolved.yaml``. Raises UserError where ``run`` is no run folder or the file is damaged."""
    path = run / RESOLVED_NAME
    if not path.is_file():
        beside = [entry.name for entry in run.parent.iterdir()] if run.parent.is_dir() else []
        hint = "" if run.is_dir() else nearest(run.name, beside)
        raise UserError(f"{run} is no run folder: it holds no {RESOLVED_NAME}{hint}")
    from pydantic import TypeAdapter, ValidationError  # here, as it takes longer to load than all else here

    try:
        return TypeAdapter(Resolved).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {str(error).splitlines()[0]}") from error
