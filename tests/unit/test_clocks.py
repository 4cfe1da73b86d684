"""The clock on the wall may jump: nothing waits by it, and no duration is measured with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALL = re.compile(r"\b(time\.time(_ns)?|datetime\.(now|utcnow|today)|date\.today|time\.(localtime|gmtime|ctime))\b")
# Run events carry the time of day, for people, and the doctor looks whether clocks are set, and alike; nobody else
# computes with it.
ALLOWED = (
    ("src/stretto/doctor/checks.py", "time.gmtime"),
    ("src/stretto/doctor/far.py", "time.time"),
    ("src/stretto/doctor/hosts.py", "time.time"),
    ("src/stretto/observe/events.py", "time.time"),
)


def wall_clocks(text: str) -> list[str]:
    """Every use of a wall clock in a file, however it was imported."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{alias.name}" for alias in node.names if alias.name in ("time", "time_ns", "localtime")]
        elif isinstance(node, ast.Attribute) and WALL.search(ast.unparse(node)):
            found.append(ast.unparse(node))
    return found


def test_only_events_know_the_time_of_day() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert files, "there is no source to look at"
    found = [(path.relative_to(ROOT).as_posix(), use) for path in files for use in wall_clocks(path.read_text())]
    assert tuple(found) == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "import time\nbegan = time.time()\n",
        "from time import time\n",
        "import datetime\nx = datetime.datetime.now()\n",
        "from datetime import datetime\nx = datetime.utcnow()\n",
        "import time\nx = time.time_ns()\n",
    ],
)
def test_a_planted_wall_clock_is_found(text: str) -> None:
    assert wall_clocks(text)


def test_steady_clocks_are_let_through() -> None:
    assert not wall_clocks("import time\ntime.monotonic()\ntime.perf_counter()\ntime.sleep(1)\nx.time\n")
