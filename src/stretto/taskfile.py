"""The task's file on disk: importing it with what lies beside it, keeping copies in the run folder, telling changes.

The copies make the run folder whole: a run goes on from it though the folder that it was started from is gone. Which
modules belong to a task is read from its import statements, at any depth and through the modules themselves; a module
that is imported by a computed name is not seen.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Final

from stretto.errors import TaskError
from stretto.mistakes import missing_module
from stretto.runfolder import write_text

COPY_NAME: Final = "task.py"
MAX_DIFF_LINES: Final = 20
_PREFIX: Final = "stretto_task_"

_loading: ContextVar[Path | None] = ContextVar("stretto_loading", default=None)


def task_being_loaded() -> Path | None:
    """The task file that is being imported at this moment, or None."""
    return _loading.get()


def import_file(path: Path) -> ModuleType:
    """Runs a task's file as a module of its own. What it imports from its folder is its own too.

    Two tasks in one process may each have their ``helper.py``: the later one gets its own. (Not so where a function of
    the earlier one imports it only when called, after the later one was loaded.)

    Raises:
        TaskError: the file is no Python, or imports what isn't there. Whatever else it raises is passed on.
    """
    folder = str(path.parent)
    _make_room(path.parent)
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    # By the whole path, so that two tasks of one name don't take each other's place.
    name = f"{_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task: {path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    token = _loading.set(path)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(f"task: {error.filename or path}, line {error.lineno}: {error.msg}") from error
    except ModuleNotFoundError as error:
        raise TaskError(missing_module(error)) from error
    finally:
        _loading.reset(token)
    return module


def _make_room(folder: Path) -> None:
    """Forgets modules that an earlier task imported from its folder, and that ``folder`` has under the same name."""
    tasks = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    others = {Path(str(module.__file__)).parent for module in tasks} - {folder}
    taken = {
        name
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None)) is not None
        and (Path(file).parent in others or (Path(file).stem == "__init__" and Path(file).parent.parent in others))
        and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())
    }
    for name in [name for name in sys.modules if name.partition(".")[0] in taken]:
        del sys.modules[name]


def sources(path: Path) -> dict[str, Path]:
    """The task's file as ``task.py``, and every source file beside it that it imports, by path below its folder."""
    folder = path.parent
    found, waiting = {COPY_NAME: path}, [path]
    while waiting:
        for name in _imported(waiting.pop()):
            for file in _files_of(folder, name):
                key = file.relative_to(folder).as_posix()
                if key not in found and file != path:
                    found[key] = file
                    waiting.append(file)
    return found


def _imported(file: Path) -> Iterator[str]:
    """The top names of all that a file imports by their whole names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _files_of(folder: Path, name: str) -> list[Path]:
    """A module's file, or all source files of a package."""
    if name == "stretto":
        return []
    if (folder / name).is_dir():
        return sorted((folder / name).rglob("*.py"))
    return [folder / f"{name}.py"] if (folder / f"{name}.py").is_file() else []


def keep_sources(run: Path, path: Path) -> None:
    """Writes the task's file, as ``task.py``, and the modules beside it that it imports into the run folder."""
    for key, file in sources(path).items():
        copy = run / key
        if copy.resolve() != file.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_text(copy, file.read_text(encoding="utf-8"))


def changes(run: Path, path: Path) -> str:
    """How the task differs from what the run folder holds, as a short unified diff; empty where it doesn't."""
    lines: list[str] = []
    for key, file in sources(path).items():
        before, now = _lines(run / key), _lines(file)
        if before is not None and before != now:
            named = f"{key} (as the run has it)", f"{file} (now)"
            lines += difflib.unified_diff(before, now or [], *named, lineterm="", n=1)
    if len(lines) > MAX_DIFF_LINES:
        lines[MAX_DIFF_LINES:] = [f"... {len(lines) - MAX_DIFF_LINES} more lines"]
    return "\n".join(lines)


def _lines(file: Path) -> list[str] | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
