"""Rows of published measurements as people write them: what is odd is skipped, counted and said, not guessed."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import UserError
from stretto.planner.accuracy import judge
from stretto.planner.published import Published, read_rows

ROW: dict[str, Any] = {
    **{"source": "internevo", "precision": "bf16 mixed", "recompute": "none", "notes": ""},
    "model": {
        **{"name": "7B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008},
        **{"vocab": 103168, "mlp": "swiglu", "tied_embeddings": False},
    },
    "hardware": {"gpu": "A100-80GB-SXM4", "count": 16, "per_node": 8, "inter": "4x100 Gb/s RoCE per node"},
    "parallel": {"dp": 8, "tp": 1, "pp": 2, "cp": 1, "ep": 1, "zero": 1, "zero_group": 8, "schedule": "1f1b"},
    "batch": {"micro": 2, "global": 128, "seq": 2048, "grad_accum": 8},
    "result": {"iter_s": 4.1594, "mem_gb": 60.0},
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """The row with another value at ``model.layers``, say."""
    found = copy.deepcopy(ROW)
    *parts, last = place.split(".")
    into = found
    for part in parts:
        into = into[part]
    into[last] = value
    return found


def file(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(text.encode())
    return path


def only(folder: Path, row: dict[str, Any]) -> Published | str:
    return next(iter(read_rows(file(folder, json.dumps(row)))))[1]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("hardware.gpu", value) for value in ("H9000", None, 7)),
        *(("hardware.count", value) for value in (0, 32, "16", 2.5, True, None, 10**30)),
        *(("model.layers", value) for value in (None, "32", 0, -1, [32])),
        *(("model", value) for value in (None, "7B", [])),
        *(("model.heads", value) for value in (None, 0)),
        *(("batch.global", value) for value in (None, 0, 8, "128", float("nan"))),
        *(("result.iter_s", value) for value in (0, -1.0, "fast", True, float("nan"), float("inf"))),
        *(("result.mem_gb", value) for value in (-3, 0, "60")),
        *(("result", value) for value in (None, 4.2, "4.2 s")),
        *(("parallel.tp", value) for value in (2, 0, None)),
        *(("parallel.zero_group", value) for value in (3, 16, "8")),
        *(("parallel.zero", value) for value in (4, -1, "1")),
        *(("parallel.sp", value) for value in ("yes", 1)),
        *(("parallel.cp", value) for value in (2, 0)),
        *(("parallel.schedule", value) for value in ("DualPipe", 3)),
        *(("precision", value) for value in (None, "int3", 16)),
        *(("recompute", value) for value in (None, "some layers", True)),
    ],
)
def test_what_is_odd_is_skipped_and_said(tmp_path: Path, place: str, value: Any) -> None:
    path = file(tmp_path, "\n".join(json.dumps(row) for row in (ROW, changed(place, value))))
    (_, good), (_, odd) = read_rows(path)
    assert isinstance(good, Published)
    assert isinstance(odd, str)
    assert odd
    (found,) = judge(read_rows(path))
    assert (found.rows, found.skipped) == (1, 1)
    assert found.time_mape is not None


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("hardware.count", 16.0),  # as tables with gaps in a column write all its counts
        ("hardware.colour", "green"),
        ("colour", None),
        ("parallel.zero_group", -1),
        ("parallel.zero_group", None),
        ("result.mem_gb", None),
        ("notes", None),
        ("parallel.schedule", "GPipe"),
    ],
)
def test_what_is_only_unusual_is_read(tmp_path: Path, place: str, value: Any) -> None:
    found = only(tmp_path, changed(place, value))
    assert isinstance(found, Published), found


def test_a_source_that_is_no_text_is_none(tmp_path: Path) -> None:
    found = list(
        read_rows(file(tmp_path, json.dumps(changed("source", None)) + "\n" + json.dumps(changed("source", 3))))
    )
    assert [source for source, _ in found] == ["", ""]
    assert [type(row) for _, row in found] == [Published, str]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("between", ["\n", "\r\n", "\n\n  \n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_may_begin_and_end_as_editors_like(tmp_path: Path, mark: str, between: str, end: str) -> None:
    found = list(read_rows(file(tmp_path, mark + between.join([json.dumps(ROW)] * 3) + end)))
    assert [type(row) for _, row in found] == [Published] * 3


def test_a_text_may_hold_what_looks_like_the_end_of_a_line(tmp_path: Path) -> None:
    row = json.dumps(changed("notes", "one\u2028two\u0085three"), ensure_ascii=False)
    assert [type(one) for _, one in read_rows(file(tmp_path, row))] == [Published]


def test_of_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert judge(read_rows(file(tmp_path, ""))) == []
    assert judge(read_rows(file(tmp_path, "\n \n"))) == []


@pytest.mark.parametrize("line", ["[1]", "{", "7", "[" * 100_000])
def test_a_line_that_is_no_object_is_told_by_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl, line 3: expected a JSON object"):
        list(read_rows(file(tmp_path, json.dumps(ROW) + "\n\n" + line)))


def test_ten_thousand_rows_take_seconds(tmp_path: Path) -> None:
    """1.2 s on one slow core; each of them validated, predicted and judged."""
    path = file(tmp_path, "\n".join(json.dumps(changed("batch.global", 16 * (1 + at % 9))) for at in range(10_000)))
    begin = time.perf_counter()
    (found,) = judge(read_rows(path))
    assert found.rows == 10_000
    assert time.perf_counter() - begin < 10


def test_zero_inside_groups_is_read_as_the_part_of_dp_that_it_cuts_over(tmp_path: Path) -> None:
    for said, shard in ((8, 8), (4, 4), (-1, 8), (None, 8)):
        found = only(tmp_path, changed("parallel.zero_group", said))
        assert isinstance(found, Published)
        assert (found.setup["shard"], found.setup["overlapped"]) == (shard, True)


def test_what_zero_cuts_is_the_systems_where_a_row_says_nothing(tmp_path: Path) -> None:
    for source, said, zero in (("vtrain_single", None, 1), ("vtrain_single", 0, 0), ("internevo", None, 0)):
        row = changed("parallel.zero", said)
        found = only(tmp_path, {**row, "source": source})
        assert isinstance(found, Published)
        assert found.setup["zero"] == zero


@pytest.mark.parametrize(
    ("gpu", "notes", "software"),
    [
        ("A100", "", "megatron-lm"),
        ("H100", "", "megatron-core"),
        ("H100", "Megatron-DeepSpeed, ZeRO-1", "megatron-deepspeed"),
        ("A100", "NeMo 24.05", "megatron-core"),
        ("NVIDIA H100 80GB HBM3", "measured with nanotron", "nanotron"),
    ],
)
def test_an_unnamed_system_is_of_its_devices_time(tmp_path: Path, gpu: str, notes: str, software: str) -> None:
    row = changed("hardware.gpu", gpu)
    found = only(tmp_path, {**row, "source": "somewhere", "notes": notes})
    assert isinstance(found, Published), found
    assert found.software == software
    assert found.setup["flash"] == (software in ("megatron-core", "nanotron"))
    (accuracy,) = judge([("somewhere", found)])
    assert accuracy.time_mape is not None
