"""What workers take their memory from: found where packages put it, and the user's to choose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.doctor.checks import checks
from stretto.launch import allocator
from stretto.launch.allocator import LIBRARY, allocator_library, allocator_variables
from stretto.planner.risk import probability_over, rehearsed


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that conda would have brought."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / LIBRARY).touch()
    return tmp_path / "lib" / LIBRARY


def said_by_doctor(folder: Path) -> str:
    (found,) = (check for check in checks(1, folder) if check.name == "memory allocator")
    assert found.passed
    return found.said


def test_the_environment_of_python_comes_first(library: Path) -> None:
    assert allocator_library() == str(library)
    assert allocator_variables() == {"LD_PRELOAD": str(library)}
    assert f"LD_PRELOAD={library}" in said_by_doctor(library.parent)


@pytest.mark.parametrize("chosen", ["", "/usr/lib/libother.so"])
def test_who_sets_the_variable_has_chosen(library: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("LD_PRELOAD", chosen)
    assert allocator_variables() == {}
    assert "LD_PRELOAD is set" in said_by_doctor(library.parent)


def test_where_there_is_none_the_doctor_says_how_to_have_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "LIBRARY", "libnone.so")
    assert allocator_library() == "" and allocator_variables() == {}
    assert "apt-get install libtcmalloc-minimal4" in said_by_doctor(library.parent)


def test_a_peak_is_trusted_further_where_the_heap_is_kept_in_order() -> None:
    heap, orderly = (rehearsed(False, True, name) for name in ("C library", "tcmalloc"))
    assert orderly == rehearsed(False, True, "jemalloc") and heap == rehearsed(False, True, "another")
    peak = 3e8
    assert peak < orderly.most(peak) < heap.most(peak) and orderly.spread_of(peak) < heap.spread_of(peak)
    near = (probability_over(peak, 1.06 * peak, one.spread_of(peak)) for one in (heap, orderly))
    assert next(near) > 0.1 > next(near)
