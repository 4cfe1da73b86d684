"""The house's budgets: sizes that keep a file readable, and habits that keep a process free of surprises.

The rules are in tests/helpers/house_rules.py. ``PLANTED`` proves that each can fail. ``EXCEPTIONS`` names
what is let through, with the reason; an exception that nothing needs any more fails too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from house_rules import (
    EVERY_RULE,
    MAX_CONSTRUCTOR_PARAMETERS,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    Finding,
    Source,
    findings,
    parse,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Exempt:
    """One reasoned exception: this name in this file may break this rule, because ``reason``."""

    rule: str
    path: str
    name: str
    reason: str


EXCEPTIONS: tuple[Exempt, ...] = (
    Exempt(
        "constructor",
        "src/stretto/launch/job.py",
        "Job",
        "a message to another process, flat as it goes over the wire; all but two of its parts have defaults",
    ),
    Exempt(
        "constructor",
        "src/stretto/plan.py",
        "Plan",
        "each part is a key that people write in a plan, so they stand flat; all have defaults",
    ),
    Exempt(
        "constructor",
        "src/stretto/watch/hang.py",
        "Standing",
        "all that is known of one rank, given by name; all but two of its parts have defaults",
    ),
    Exempt(
        "unpickling",
        "src/stretto/data/parcel.py",
        "pickle",
        "a batch is any object; read is only what a process forked from this one has written to a file without a name",
    ),
    Exempt(
        "constructor",
        "src/stretto/order.py",
        "TrainOrder",
        "likewise a message to another process, flat as it goes over the wire; four of its parts have defaults",
    ),
    Exempt(
        "constructor",
        "src/stretto/planner/setups.py",
        "Setups",
        "a table: each part is a column of what plans and recipes say, given by name",
    ),
    Exempt(
        "constructor",
        "src/stretto/planner/transformer.py",
        "Transformer",
        "each part is a key that people write in a description of a model, so they stand flat",
    ),
    Exempt(
        "constructor",
        "src/stretto/planner/published.py",
        "Published",
        "one row of a table of measurements, given by name",
    ),
    Exempt(
        "constructor",
        "src/stretto/planner/accuracy.py",
        "Accuracy",
        "one row of a printed table, flat as it is written in JSON; most parts have defaults",
    ),
)


def house_files(root: Path = ROOT) -> list[Path]:
    folders = ("src", "examples", "benchmarks", "tests")
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def test_the_house_keeps_its_budgets() -> None:
    files = house_files()
    assert any("src/stretto/" in path.as_posix() for path in files), "there is no source to look at"
    every = [finding for path in files for finding in findings(parse(path, ROOT))]
    let_through = {(e.rule, e.path, e.name) for e in EXCEPTIONS}
    assert all(len(e.reason) > 20 for e in EXCEPTIONS), "an exception needs a reason"
    broken = [str(f) for f in every if (f.rule, f.path, f.name) not in let_through]
    assert not broken, "\n" + "\n".join(broken)
    unneeded = let_through - {(f.rule, f.path, f.name) for f in every}
    assert not unneeded, f"exceptions that nothing needs: {sorted(unneeded)}"


def test_pytest_leaves_no_folder_of_tests_out(pytestconfig: pytest.Config) -> None:
    """It did leave out tests/dist for a while: a folder of that name is passed over unless one says otherwise."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert not [part for part in parts for pattern in patterns if fnmatch(part, pattern)]


# -------------------------------------------------------------------------- each rule can fail, and can pass

LONG = "def f() -> None:\n" + "    print()\n" * MAX_FUNCTION_LINES
WIDE = ", ".join(f"a{i}: int" for i in range(MAX_CONSTRUCTOR_PARAMETERS + 1))
FIELDS = "".join(f"    a{i}: int = 0\n" for i in range(MAX_CONSTRUCTOR_PARAMETERS + 1))
PLANTED = (
    ("file-length", "x = 1\n" * (MAX_FILE_LINES + 1)),
    ("function-length", LONG),
    ("function-length", "class A:\n" + "".join(f"    {line}\n" for line in LONG.splitlines())),
    ("constructor", f"class A:\n    def __init__(self, {WIDE}) -> None: ...\n"),
    ("constructor", f"@dataclass\nclass A:\n{FIELDS}"),
    ("constructor", f"@dataclasses.dataclass(frozen=True)\nclass A:\n{FIELDS}"),
    ("annotations", "def f(x) -> None: ...\n"),
    ("annotations", "def f(x: int): ...\n"),
    ("annotations", "def f(*args, **kwargs) -> None: ...\n"),
    ("annotations", "class A:\n    def f(self, *, x) -> None: ...\n"),
    ("annotations", "class A:\n    @staticmethod\n    def f(x) -> None: ...\n"),
    ("annotations", "def f() -> None:\n    async def g(x): ...\n"),
    ("module-state", "CACHE = {}\n"),
    ("module-state", "CACHE: Final[dict[str, int]] = {'a': 1}\n"),
    ("module-state", "NAMES = [n for n in 'ab']\n"),
    ("module-state", "CACHE = collections.defaultdict(list)\n"),
    ("module-state", "PAIR = (1, [2])\n"),
    ("module-state", "TABLE = MappingProxyType({'a': []})\n"),
    ("module-state", "try:\n    import x\nexcept ImportError:\n    SEEN = set()\n"),
    ("module-state", "count = 0\ncount += 1\n"),
    ("module-state", "count = 0\ndef f() -> None:\n    global count\n    count = 1\n"),
    ("star-import", "from os.path import *\n"),
    ("environment", "import os\nx = os.environ['A']\n"),
    ("environment", "import os\ndef f() -> str | None:\n    return os.getenv('A')\n"),
    ("environment", "from os import environ\n"),
    ("unpickling", "import pickle\n"),
    ("unpickling", "def f() -> None:\n    from pickle import loads\n"),
    ("unpickling", "import torch\nx = torch.load('a', weights_only=True)\n"),
    ("unpickling", "from torch import load\n"),
    ("unpickling", "import torch.distributed as dist\ndist.broadcast_object_list([])\n"),
    ("unpickling", "import numpy\nnumpy.load('a', allow_pickle=True)\n"),
    ("unfinished", "x = 1  # TO" + "DO: more\n"),
)
FINE = (
    LONG.replace("    print()\n", "", 1),
    "@dataclass(frozen=True, kw_only=True)\nclass Row:\n" + FIELDS,
    "@dataclass\nclass A:\n    x: int\n    a: ClassVar[int] = 0\n" + "    b: int = field(init=False)\n" * 9,
    "class A:\n    def f(self, x: int) -> None: ...\n    @classmethod\n    def g(cls) -> None: ...\n",
    "A: Final = (1, 2)\nB = frozenset({1})\nC = MappingProxyType({'a': (1,)})\n__all__ = ['A']\n",
    "def f() -> None:\n    cache: dict[str, int] = {}\n",
    "import numpy\nnumpy.load('a', allow_pickle=False)\n",
    "import json\njson.load(open('a'))\n",
)


def planted(text: str, path: str = "src/stretto/planted.py") -> list[Finding]:
    return findings(Source(path, text, ast.parse(text)))


@pytest.mark.parametrize(("rule", "text"), PLANTED)
def test_a_planted_breach_is_found(rule: str, text: str) -> None:
    assert {finding.rule for finding in planted(text)} == {rule}


def test_every_rule_has_a_planted_breach() -> None:
    assert {rule for rule, _ in PLANTED} == set(EVERY_RULE)


@pytest.mark.parametrize("text", FINE)
def test_good_code_is_let_through(text: str) -> None:
    assert planted(text) == []


def test_only_launch_reads_the_environment() -> None:
    assert planted("import os\nx = os.environ['A']\n", "src/stretto/launch/local.py") == []
