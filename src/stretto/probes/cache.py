"""Findings of earlier launches, kept by the content of what they are about: what didn't change isn't probed twice.

The key covers the task's file, the modules beside it that it imported, the versions of the packages that these use,
the settings, and what of the recipe chooses the samples. It doesn't cover data files.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final

from stretto.errors import UserError
from stretto.probes.verdict import Findings
from stretto.runfolder import write_text
from stretto.task import Task

MOST_FILES: Final = 200
FOLDER_NAME: Final = ".probes"


def content_key(task: Task) -> str | None:
    """A digest of all that the probes' findings hang on; None for a task that was handed over as an object."""
    if task.path is None:
        return None
    found = hashlib.sha256()
    versions: dict[str, str] = {}
    files = {task.path}
    for path, module in _beside(task.path.parent):
        files.add(path)
        versions.update(_versions(module))
    for path in sorted(files):
        found.update(f"{path.relative_to(task.path.parent)}\0".encode() + path.read_bytes() + b"\0")
    settings = {name: repr(setting.value) for name, setting in sorted(task.settings.items())}
    chosen = [sorted(versions.items()), settings, task.recipe.batch, task.recipe.seed]
    found.update(json.dumps(chosen).encode())
    return found.hexdigest()


def read_findings(folder: Path, key: str) -> Findings | None:
    """What is known by this key; None where nothing is, or the file is damaged."""
    try:
        return Findings.from_json(json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return None


def write_findings(folder: Path, key: str, findings: Findings) -> None:
    """Keeps them, and the newest of the others. A folder that can't be written costs a probe at the next launch."""
    with suppress(OSError, UserError):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps(findings.to_json(), indent=1) + "\n")
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MOST_FILES:]:
            path.unlink()


def _beside(folder: Path) -> Iterator[tuple[Path, ModuleType]]:
    """The loaded modules whose files lie in the folder or below, without installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file is None or not (path := Path(file)).is_relative_to(folder):
            continue
        if path.is_file() and not any(path.is_relative_to(each) for each in installed):
            yield path, module


def _versions(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The packages that the module's names come from, and torch and stretto, each with its version."""
    names = {"torch", "stretto"}
    for value in list(vars(module).values()):
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(origin, str):
            names.add(origin.partition(".")[0])
    for name in names:
        if (package := sys.modules.get(name)) is not None:
            yield name, str(vars(package).get("__version__", ""))
