"""Workers run on the allocator that is found, and what they start does not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.launch import Job, LocalLauncher
from stretto.launch.allocator import LIBRARY, allocator_library


HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


def told(launcher: LocalLauncher) -> dict[str, Any]:
    (found,) = launcher.run(Job("allocator_entries:work", {}, 1, python_path=(HELPERS,))).results.values()
    assert found is not None
    return found


@pytest.fixture
def some_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that does nothing to a process, in tcmalloc's place: not every machine has that."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    (tmp_path / "lib").mkdir()
    shutil.copy(next(word for word in maps if Path(word).name.startswith("libm.so")), tmp_path / "lib" / LIBRARY)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return str(tmp_path / "lib" / LIBRARY)


def test_workers_have_the_library_and_not_the_variable(some_library: str) -> None:
    with LocalLauncher() as launcher:
        found = told(launcher)
    assert some_library in found["libraries"] and found["variable"] is None


def test_a_launcher_may_leave_it_to_the_environment(some_library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalLauncher(own_allocator=False) as launcher:
        found = told(launcher)
    assert some_library not in found["libraries"] and found["variable"] is None
    monkeypatch.setenv("LD_PRELOAD", "")
    with LocalLauncher() as launcher:
        assert told(launcher)["variable"] == ""


def test_what_was_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with LocalLauncher() as launcher:
        found = told(launcher)
    assert found["allocator"] == ("tcmalloc" if allocator_library() else "C library")
    held, freed, returned = found["sizes"]
    assert held > 100e6 and freed - returned > 50e6, found
