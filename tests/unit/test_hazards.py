"""The page of hazards says what the tests hold, and every hazard is held, or has a reason not to be."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hazards_script", ROOT / "scripts" / "hazards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hazards_script"] = module  # where a dataclass looks while it is made
    spec.loader.exec_module(module)
    return module


hazards = _script()


def test_the_page_is_as_the_script_writes_it() -> None:
    written = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
    assert written == hazards.page(), "run `python scripts/hazards.py`"


def test_every_hazard_is_held_or_has_a_reason() -> None:
    assert hazards.open_ids() == []


def test_a_hazard_is_known_by_its_id_and_not_held_and_excused_at_once() -> None:
    known = [hazard.id for hazard in hazards.read_hazards()]
    assert len(set(known)) == len(known) > 60
    holders, reasons = hazards.find_holders(), hazards.read_reasons()
    assert holders.keys() <= set(known), "a test's name ends with an id that is none"
    assert reasons.keys() <= set(known), "a reason for a hazard that is none"
    assert not holders.keys() & reasons.keys(), "held, and said not to apply"
    assert all(reason.endswith(".") and len(reason) > 40 for reason in reasons.values()), "a reason is a sentence"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_a_ls01", ["LS01"]),
        ("test_a_ls01_pc02_sh14", ["LS01", "PC02", "SH14"]),
        ("test_ls01_a", []),
        ("test_a_fp16", ["FP16"]),  # which is no hazard, and found by the test above
        ("test_zero_3", []),
    ],
)
def test_the_end_of_a_name_is_what_it_holds(name: str, ids: list[str]) -> None:
    assert hazards.ids_of(name) == ids


def test_an_open_hazard_and_a_stale_page_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "hazards"
    folder.mkdir(parents=True)
    line = '{"id": "XX01", "area": "a", "kind": "k|l", "right": "r", "seen_in": "https://example.org"}\n'
    (folder / "hazards.jsonl").write_text(line + line.replace("01", "03"))
    (folder / "not_applicable.yaml").write_text("")
    assert hazards.open_ids(tmp_path) == ["XX01", "XX03"]
    before = hazards.page(tmp_path)
    (tmp_path / "tests" / "test_x.py").write_text("class A:\n    def test_it_xx03(self): ...\n")
    assert hazards.open_ids(tmp_path) == ["XX01"]
    assert "`tests/test_x.py::test_it_xx03`" in hazards.page(tmp_path) != before
