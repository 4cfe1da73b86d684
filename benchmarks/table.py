"""Writes the tables of measured ratios into README.md and README.zh-CN.md, from the results that were kept.

    python benchmarks/table.py

It replaces what stands between ``<!-- benchmarks/zero -->`` and ``<!-- /benchmarks/zero -->``. A unit test holds that
the tables there are what this makes of ``benchmarks/zero/results.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "zero" / "results.json"
BEGIN, END = "<!-- benchmarks/zero -->", "<!-- /benchmarks/zero -->"
TITLES: Final = {"Accelerate": "accelerate", "DeepSpeed": "deepspeed"}  # the columns beside torch's: title and package
WORDS: Final = json.loads((ROOT / "benchmarks" / "table_words.json").read_text(encoding="utf-8"))  # by README


def best_peer(comparison: Mapping[str, Any]) -> str:
    """The name of the fastest peer of one comparison."""
    measured = [peer for peer in comparison["peers"] if "ratio" in peer]
    return str(min(measured, key=lambda peer: peer["milliseconds"])["name"])


def make_table(results: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """A sentence, and a table: a row for each plan, a column for each package."""
    versions = {package: version or "" for package, version in results["versions"].items()}
    heads = [words["head"], words["torch"].format(version=versions["torch"].partition("+")[0])]
    heads += [f"{title} {versions[package]}".strip() for title, package in TITLES.items()]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for comparison in results["comparisons"]:
        peers = {peer["package"]: peer for peer in comparison["peers"]}
        cells = [_cell(peers.get(package), comparison, words) for package in ("torch", *TITLES.values())]
        lines.append(" | ".join([f"| `{comparison['plan']}`", *cells]) + " |")
    return "\n".join([words["intro"], "", *lines])


def _cell(peer: Mapping[str, Any] | None, comparison: Mapping[str, Any], words: Mapping[str, str]) -> str:
    if peer is None:
        return ""
    if "ratio" not in peer:
        return words["missing"]
    if comparison["void"]:
        return words["void"].format(control=comparison["control"]["median"])
    text = words["ratio"].format(**peer["ratio"])
    return f"**{text}**" if peer["name"] == best_peer(comparison) else text


def with_table(text: str, table: str) -> str:
    """``text`` with ``table`` between the markers. Raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, each on a line of its own")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}" if table else f"{before}{begin}\n{end}{after}"


def kept() -> dict[str, Any]:
    """The results that were kept. Raises FileNotFoundError where none were."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Rewrites both READMEs."""
    results = kept()
    for name, words in WORDS.items():
        path = ROOT / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), make_table(results, words)), encoding="utf-8")


if __name__ == "__main__":
    main()
