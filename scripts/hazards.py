"""Writes docs/hazards.md: which test holds which hazard. `--check` writes nothing; it ends with 1 where that is stale.

The hazards are real faults of other systems (tests/hazards/hazards.jsonl). A test says which it holds at the end of its
name: `test_a_short_window_is_divided_by_its_own_weight_ls05`. What does not apply here has a reason in
tests/hazards/not_applicable.yaml.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "hazards.md"
AN_ID = re.compile(r"[a-z]{2}[0-9]{2}")
HEAD = """# Hazards

<!-- Written by `python scripts/hazards.py` from the names of the tests; a test fails where it is out of date. -->

Parallel training breaks in ways that were seen before. These are real faults of other systems of this field, by the
discussion that each was seen in. Each is held by a test that fails where this system has it too, or does not apply
here, for a reason. A test says which it holds at the end of its name: `..._ls05`.
"""


@dataclass(frozen=True)
class Hazard:
    """One kind of fault: what it is, what is right instead, and where it was seen."""

    id: str
    area: str
    kind: str
    right: str
    seen_in: str


def read_hazards(root: Path = ROOT) -> list[Hazard]:
    """All hazards, in the order of the file, which is by area."""
    lines = (root / "tests" / "hazards" / "hazards.jsonl").read_text(encoding="utf-8").splitlines()
    return [Hazard(**json.loads(line)) for line in lines]


def read_reasons(root: Path = ROOT) -> dict[str, str]:
    """Why a hazard does not apply, by id."""
    text = (root / "tests" / "hazards" / "not_applicable.yaml").read_text(encoding="utf-8")
    found: dict[str, str] = yaml.safe_load(text) or {}
    return found


def ids_of(name: str) -> list[str]:
    """The hazards that a test's name ends with: `test_a_b_ls01_pc02` holds LS01 and PC02."""
    found: list[str] = []
    for word in reversed(name.split("_")):
        if not AN_ID.fullmatch(word):
            break
        found.insert(0, word.upper())
    return found


def find_holders(root: Path = ROOT) -> dict[str, list[str]]:
    """The tests that hold each hazard, as `path::name`."""
    holders: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for each in ids_of(node.name):
                    holders.setdefault(each, []).append(f"{path.relative_to(root).as_posix()}::{node.name}")
    return holders


def open_ids(root: Path = ROOT) -> list[str]:
    """The hazards that no test holds and no reason excuses."""
    holders, reasons = find_holders(root), read_reasons(root)
    return [hazard.id for hazard in read_hazards(root) if hazard.id not in holders and hazard.id not in reasons]


def page(root: Path = ROOT) -> str:
    """The whole page."""
    hazards, holders, reasons = read_hazards(root), find_holders(root), read_reasons(root)
    held = sum(hazard.id in holders for hazard in hazards)
    counts = f"{len(hazards)} hazards: {held} held by tests, {len(reasons)} not applicable"
    missing = open_ids(root)
    lines = [HEAD, counts + (f", {len(missing)} open." if missing else ".")]
    for area in dict.fromkeys(hazard.area for hazard in hazards):
        lines += ["", f"## {area}", "", "| id | what breaks | held by |", "|---|---|---|"]
        lines += [_row(hazard, holders, reasons) for hazard in hazards if hazard.area == area]
    return "\n".join(lines) + "\n"


def _row(hazard: Hazard, holders: Mapping[str, list[str]], reasons: Mapping[str, str]) -> str:
    if hazard.id in holders:
        told = "<br>".join(f"`{test}`" for test in holders[hazard.id])
    else:
        told = f"does not apply: {reasons[hazard.id]}" if hazard.id in reasons else "open"
    kind = hazard.kind.replace("|", "\\|")
    return f"| [{hazard.id}]({hazard.seen_in}) | {kind} | {told} |"


def main(arguments: list[str]) -> int:
    """Writes the page, or with `--check` only says whether it is as it would be written. Returns the exit code."""
    wanted = page()
    if arguments == ["--check"]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != wanted:
            print("docs/hazards.md is out of date: run `python scripts/hazards.py`", file=sys.stderr)
        return int(current != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    missing = open_ids()
    print(f"{PAGE.relative_to(ROOT)} is written" + (f"; open: {', '.join(missing)}" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
