"""The import floors: a package imports only what stands below it, so each part can be read and tested alone.

The order is one list, highest first. A file may import its own entry and entries that stand later. Three
things are added: no face uses another, what needs a process or a device never enters the pure floor, and only
instruments may use the test tools. Imports inside functions count; imports for types alone count (a type that
a file can't do without is a dependency of its reader); so do names of modules in strings ("package.module" or
"package.module:function"): a fork server that is told by a literal what to run depends on it as by an import.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stretto"

FACES = ("dashboard", "report", "serve", "search", "compress", "pool", "submit")
INSTRUMENTS = ("verify", "doctor", "chaos")
ENGINE = (
    *(
        "script",
        "planning",
        "choose",
        "rehearse",
        "ahead",
        "preload",
        "training",
        "prelaunch",
        "order",
        "loop",
        "run",
        "prepared",
        "best",
        "weights",
        "explain",
        "features",
        "assemble",
    ),
    *("forecast", "corrections", "skips", "kept", "timeline", "step", "terms", "evaluation", "machinery"),
    *("launch", "elastic", "watch", "checkpoint"),
)
STRATEGIES = ("parallel", "sync", "wire")
PURE = ("planner", "schedule", "graph")
GROUND = (
    "probes",  # runs a task's own data and model, and keeps files: it looks down on all of the ground
    *("state", "comm", "data", "observe"),
    *("losses", "task", "layout", "metrics", "collate", "taskfile", "runfolder", "recipe", "plan", "cluster", "mesh"),
    *("precision", "mistakes", "errors"),
)
# The package itself ("stretto", its __init__) stands above all: it is the list of names that users import.
ORDER = ("stretto", "__main__", "cli", *FACES, *INSTRUMENTS, *ENGINE, *STRATEGIES, *PURE, *GROUND)
TESTING = "testing"  # may import anything, so it has no place in the order
MAY_USE_TESTING = (TESTING, *INSTRUMENTS)
IMPURE = ("multiprocessing", "subprocess", "threading", "socket", "torch.distributed", "torch.cuda")
MODULE_NAME = re.compile(r"stretto(\.[A-Za-z_]\w*)+(:\w+)?")


def entry_of(path: Path, root: Path) -> str:
    """The entry of the list that a file belongs to: its top package, or its own name."""
    first = path.relative_to(root).parts[0]
    if first == "__init__.py":
        return "stretto"
    return first.removesuffix(".py")


def imported_modules(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, at any depth; ``package`` is the file's own package.

    ``from a import b`` gives ``a.b``: whether b is a module or a name in it, its entry is the same.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).partition(":")[0]


def may_import(importer: str, imported: str) -> bool:
    """Whether the law lets a file of ``importer`` import ``imported`` (both entries)."""
    if importer in (imported, TESTING):
        return True
    if imported == TESTING:
        return importer in MAY_USE_TESTING
    if importer in FACES and imported in FACES:
        return False
    return ORDER.index(imported) > ORDER.index(importer)


def breaches(root: Path) -> list[str]:
    """Every breach of the floors under ``root`` (a folder like src/stretto), one line each."""
    found: list[str] = []
    files = sorted(root.rglob("*.py"))
    existing = {entry_of(path, root) for path in files}
    for path in files:
        importer = entry_of(path, root)
        place = path.relative_to(root).as_posix()
        if importer not in (*ORDER, TESTING):
            found.append(f"{place}: {importer!r} has no place in the list of floors; give it one here")
            continue
        package = ("stretto", *path.relative_to(root).parent.parts)
        for line, name in imported_modules(ast.parse(path.read_text(encoding="utf-8")), package):
            if importer in PURE and any(f"{name}.".startswith(f"{word}.") for word in IMPURE):
                found.append(f"{place}:{line}: {importer} is pure, and imports {name}")
            if name.split(".")[0] != "stretto":
                continue
            parts = name.split(".")
            if parts[1:] == ["__version__"]:
                continue  # a constant, and the package's __init__ has run by then anyway
            imported = parts[1] if len(parts) > 1 and parts[1] in existing else "stretto"
            known = imported in (*ORDER, TESTING)
            if known and not may_import(importer, imported):
                found.append(f"{place}:{line}: {importer} must not import {imported} ({name})")
    return found


def test_the_source_keeps_the_floors() -> None:
    assert list(SOURCE.rglob("*.py")), "there is no source to look at"
    assert not breaches(SOURCE), "\n" + "\n".join(breaches(SOURCE))


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """The breaches of a small tree that holds ``files`` and the entries that they name."""
    for entry in ORDER[2:]:
        (root / f"{entry}.py").write_text("")
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(path.relative_to(root).parts) > 1:
            (root / f"{path.relative_to(root).parts[0]}.py").unlink(missing_ok=True)
        path.write_text(text)
    return breaches(root)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("state/box.py", "import stretto.run\n", id="import"),
        pytest.param("state/box.py", "from stretto.run import start\n", id="from-import"),
        pytest.param("state/box.py", "from stretto import run\n", id="from-package"),
        pytest.param("state/box.py", "from .. import run\n", id="relative-package"),
        pytest.param("state/box.py", "from ..run import start\n", id="relative-module"),
        pytest.param("state/deep/er/box.py", "from ....run import start\n", id="relative-deep"),
        pytest.param("launch/local.py", "def f():\n    import stretto.loop\n", id="inside-a-function"),
        pytest.param(
            "comm/group.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stretto.sync import Reducer\n",
            id="types-only",
        ),
        pytest.param("launch/local.py", "ENTRY = 'stretto.run:work'\n", id="entry-in-a-string"),
        pytest.param("launch/local.py", "import_module('stretto.loop')\n", id="module-in-a-string"),
        pytest.param("run.py", "import stretto.loop\n", id="same-floor-earlier"),
        pytest.param("task.py", "from stretto.losses import mse\n", id="ground-order"),
        pytest.param("state/box.py", "from stretto import start\n", id="a-name-of-the-facade"),
        pytest.param("state/box.py", "import stretto\n", id="the-facade"),
        pytest.param("report/html.py", "from stretto.serve import page\n", id="face-uses-a-later-face"),
        pytest.param("run.py", "from stretto.testing import faults\n", id="product-uses-test-tools"),
        pytest.param("planner/costs.py", "import subprocess\n", id="process-in-pure"),
        pytest.param("planner/costs.py", "from torch import distributed\n", id="groups-in-pure"),
        pytest.param("attic/box.py", "", id="a-room-outside-the-list"),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, name: str, text: str) -> None:
    found = plant(tmp_path, {name: text, "testing/__init__.py": ""})
    assert len(found) == 1, found
    assert found[0].startswith(name)


def test_what_the_law_allows_is_let_through(tmp_path: Path) -> None:
    allowed = {
        "__init__.py": "from stretto.run import start\n",
        "cli/main.py": "def f():\n    from stretto.verify import prove\n    from stretto.run import start\n",
        "loop.py": "from stretto.run import Run\nfrom stretto import launch, __version__\n",
        "launch/local.py": "import stretto.launch.server\nfrom . import job\nfrom ..elastic import epoch\n",
        "task.py": "from stretto.recipe import Recipe\nimport torch\n",
        "planner/costs.py": "import math\nfrom stretto.plan import Plan\n",
        "testing/suite.py": "import stretto.cli\nimport stretto.run\n",
        "chaos/kill.py": "import stretto.testing\n",
    }
    assert plant(tmp_path, allowed) == []


def loaded_by(statement: str, module: str) -> bool:
    """Whether a new Python that runs ``statement`` has ``module`` loaded after it."""
    code = f"{statement}\nimport sys\nprint({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True"


@pytest.mark.parametrize("module", ["stretto", "stretto.cli.main", "stretto.launch", "stretto.elastic"])
def test_the_commands_start_without_torch(module: str) -> None:
    """torch takes seconds to load, so neither the command line nor the launcher's side loads it to start."""
    assert not loaded_by(f"import {module}", "torch")


def test_the_command_line_starts_without_pydantic() -> None:
    assert not loaded_by("import stretto.cli.main", "pydantic")


def test_a_loaded_module_is_seen() -> None:
    assert loaded_by("import json", "json")
