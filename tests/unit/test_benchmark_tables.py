"""The tables of measured ratios in the READMEs are what the script makes of the results that were kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _peer(name: str, package: str, milliseconds: float, median: float) -> dict[str, Any]:
    ratio = {"median": median, "lower": median - 0.01, "upper": median + 0.01}
    return {"name": name, "package": package, "milliseconds": milliseconds, "ratio": ratio}


def _results(*peers: dict[str, Any], void: bool = False) -> dict[str, Any]:
    comparison = {"plan": "dp=2,zero=1", "control": {"median": 1.031}, "void": void, "peers": list(peers)}
    return {"versions": {"torch": "2.13.0+cpu", "accelerate": None, "deepspeed": "0.19.8"}, "comparisons": [comparison]}


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readmes_table_is_made_from_the_kept_results(script: ModuleType, name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    table = script.make_table(script.kept(), script.WORDS[name]) if script.RESULTS.exists() else ""
    assert text == script.with_table(text, table), "run: python benchmarks/table.py"


def test_the_fastest_peer_is_bold_and_no_peer_is_dropped_in_silence(script: ModuleType) -> None:
    absent = {"name": "Accelerate", "package": "accelerate"}
    results = _results(_peer("DDP", "torch", 500.0, 0.97), absent, _peer("ZeRO-1", "deepspeed", 620.0, 0.79))
    row = script.make_table(results, script.WORDS["README.md"]).splitlines()[-1]
    assert row == "| `dp=2,zero=1` | **0.97 (0.96 to 0.98)** | not installed | 0.79 (0.78 to 0.80) |"


def test_a_void_comparison_shows_no_ratio(script: ModuleType) -> None:
    results = _results(_peer("DDP", "torch", 500.0, 0.97), void=True)
    row = script.make_table(results, script.WORDS["README.md"]).splitlines()[-1]
    assert row == "| `dp=2,zero=1` | void (control 1.031) |  |  |"


def test_a_readme_without_the_markers_is_named_an_error(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected <!-- benchmarks/zero -->"):
        script.with_table("# stretto\n", "table")
