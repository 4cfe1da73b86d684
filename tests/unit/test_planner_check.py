"""``stretto plan --check``: what rows are read as, what counts as a miss, and what the table says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.cli.app import app
from stretto.cli.plan import _COLUMNS
from stretto.planner import accuracy, hardware
from stretto.planner.accuracy import Accuracy, judge, predict_memory
from stretto.planner.hardware import find_device
from stretto.planner.published import Published, read_rows

LLAMA = {
    **{"name": "nanotron-llama-1B", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192},
    **{"vocab": 131072, "mlp": "swiglu", "tied_embeddings": True},
}
RANK0 = "Memory logged by world rank 0 (first pipeline stage), torch max allocated or reserved not stated."
PLAYBOOK: dict[str, Any] = {
    **{"source": "hf_ultrascale_playbook", "kind": "both", "model": LLAMA, "recompute": "none"},
    "hardware": {"gpu": "H100-80GB-SXM", "count": 8, "per_node": 8, "inter": "AWS EFA"},
    "parallel": {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "interleave": 1, "sp": None},
    "batch": {"micro": 2, "global": 256, "seq": 4096, "grad_accum": 16},
    **{"precision": "bf16", "notes": RANK0, "result": {"iter_s": 3.2646, "mem_gb": 50.2}},
}
OPT = {
    **{"name": "OPT-350M", "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096},
    **{"vocab": 50272, "mlp": "gelu/relu(2 matmul)", "tied_embeddings": False, "pos": "learned"},
}
SAILOR: dict[str, Any] = {
    **{"source": "sailor_gh200", "kind": "both", "model": OPT, "recompute": "none", "precision": "fp32 (TF32 likely)"},
    "hardware": {"gpu": "GH200-96GB", "count": 64, "per_node": 4, "inter": "Slingshot 4x200 Gb/s per node"},
    "parallel": {"dp": 4, "tp": 4, "pp": 4, "zero": 0, "sp": False, "stage_layers": [5, 7, 7, 7]},
    "batch": {"micro": 8, "global": 1024, "seq": 2048, "grad_accum": 32},
    "result": {"iter_s": 2.72578, "mem_gib_nvidia_smi": 23.414},
}
LAYER: dict[str, Any] = {
    **{"source": "sailor_layer_memory", "kind": "microbench", "model": OPT, "precision": "fp32"},
    "hardware": {"gpu": None, "count": 1},
    "parallel": {"dp": 1, "tp": 4, "pp": 1},
    "batch": {"micro": 1, "global": None, "seq": 2048},
    "result": {"layer_act_mem_bytes": 109068288},
}
TITAN: dict[str, Any] = {
    **{"source": "torchtitan", "kind": "both", "recompute": "selective(op)", "precision": "bf16 mixed"},
    "model": {
        **{"name": "Llama-3.1-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336},
        **{"vocab": 128256, "mlp": "swiglu", "tied_embeddings": False},
    },
    "hardware": {"gpu": "H100-96GB-HBM2e-500W(SXM)", "count": 128, "per_node": 8, "inter": "400 Gb/s per GPU RDMA"},
    "parallel": {"dp": 128, "tp": 1, "pp": 1, "zero": 3},
    "batch": {"micro": 2, "global": 256, "seq": 8192},
    **{"result": {"iter_s": 2.9231, "mem_gib_max": 67.0}, "notes": "memory = max reserved over all GPUs"},
}
BLOOM: dict[str, Any] = {
    **{"source": "bigscience_bloom_tuning", "kind": "both", "recompute": "full", "precision": "fp16"},
    "model": {
        **{"name": "BLOOM-like 200B", "layers": 80, "hidden": 14400, "heads": 96, "ffn": 57600},
        **{"vocab": 250000, "mlp": "gelu(2 matmul)", "tied_embeddings": True},
    },
    "hardware": {"gpu": "A100-80GB-SXM", "count": 160, "per_node": 8, "inter": "4x100 Gb/s Omni-Path per node"},
    "parallel": {"dp": 2, "tp": 8, "pp": 10, "zero": 1},
    "batch": {"micro": 1, "global": 2048, "seq": 2048},
    "result": {"iter_s": 430.21, "mem_gb": 51},
}


def changed(row: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The row, with parts of it, and of its dictionaries, replaced."""
    found = copy.deepcopy(row)
    for key, value in parts.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) and key != "result" else value
    return found


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read(folder: Path, *rows: dict[str, Any]) -> list[Published | str]:
    return [row for _, row in read_rows(written(folder, *rows))]


def good(folder: Path, *rows: dict[str, Any]) -> list[Published]:
    found = read(folder, *rows)
    assert all(isinstance(row, Published) for row in found), found
    return [row for row in found if isinstance(row, Published)]


def judged(folder: Path, *rows: dict[str, Any]) -> list[Accuracy]:
    return judge(read_rows(written(folder, *rows)))


def test_published_memory_is_predicted(tmp_path: Path) -> None:
    """One run of each system; bounds are about twice what each source's median is off by."""
    for off, rows in ((0.08, [PLAYBOOK]), (0.12, [TITAN]), (0.08, [BLOOM]), (0.05, [SAILOR, LAYER])):
        row = next(one for one in read(tmp_path, *rows) if isinstance(one, Published))
        told, over = predict_memory([row])
        assert row.memory_bytes is not None
        assert told[0] == pytest.approx(row.memory_bytes, rel=off), row.source
        assert over[0] < 0.5, row.source


def test_a_figure_of_memory_is_what_the_row_says_it_is(tmp_path: Path) -> None:
    said = changed(PLAYBOOK, notes="max allocated, on the worst rank", source="other")
    silent = changed(PLAYBOOK, notes="", source="other")
    found = good(tmp_path, PLAYBOOK, SAILOR, TITAN, BLOOM, said, silent)
    kinds = [(row.memory_kind, row.memory_first) for row in found]
    assert kinds == [
        ("reserved", True),
        ("total", False),
        ("reserved", False),
        ("total", False),
        ("allocated", False),
        ("reserved", False),
    ]
    assert found[0].memory_bytes == pytest.approx(50.2 * 2**30)


def test_a_first_stage_is_judged_by_itself(tmp_path: Path) -> None:
    wide = changed(PLAYBOOK, model={"vocab": 500_000}, parallel={"dp": 4, "pp": 2, "zero": 1})
    wide = changed(wide, batch={"micro": 4, "global": 16, "grad_accum": 1})
    anywhere = changed(wide, notes="")
    (first, worst), over = predict_memory(good(tmp_path, wide, anywhere))
    assert worst > 1.5 * first
    assert first < 0.7 * find_device("H100").memory_bytes
    assert over[0] == over[1] > 0.9, "what has to fit is the worst stage, wherever memory was read"


def test_a_device_has_nearly_the_bytes_that_its_name_says() -> None:
    for name, mebibytes in (("H100", 81559), ("H200", 143771), ("V100", 32510), ("GH200", 97871)):
        assert find_device(name).memory_bytes == pytest.approx(mebibytes * 2**20, rel=0.005)


def test_no_two_devices_have_a_name_in_common() -> None:
    names = [(key, name) for key, one in hardware._known().items() for name in (key, *one["aliases"])]
    assert [find_device(f"NVIDIA {name} (DGX)").name for _, name in names] == [key for key, _ in names]


def test_a_measured_layer_and_a_stated_cut_are_used(tmp_path: Path) -> None:
    row = good(tmp_path, SAILOR)[0]
    assert row.cut == (4, 7, 7, 6)
    assert row.layer_bytes is None
    found = [one for one in read(tmp_path, SAILOR, LAYER) if isinstance(one, Published)]
    assert found[0].layer_bytes == pytest.approx(109068288 / 2048)
    for other in ({"parallel": {"tp": 2}}, {"batch": {"seq": 1024}}, {"precision": "bf16"}, {"model": {"name": "x"}}):
        found = [one for one in read(tmp_path, SAILOR, changed(LAYER, **other)) if isinstance(one, Published)]
        assert found[0].layer_bytes is None, other


@pytest.mark.parametrize("layers", [[5, 7, 7], [9, 9, 9, 9], None])
def test_a_cut_that_cannot_be_is_passed_over(tmp_path: Path, layers: list[int] | None) -> None:
    assert good(tmp_path, changed(SAILOR, parallel={"stage_layers": layers}))[0].cut is None


FAILED = {"status": "oom_or_crash"}


def failing(micro: int, status: str = "oom_or_crash", **parts: Any) -> dict[str, Any]:
    batch = {"micro": micro, "grad_accum": 32 // micro}
    return changed(PLAYBOOK, source="hf_ultrascale_playbook_oom", batch=batch, result={"status": status}, **parts)


def test_a_failed_run_whose_batch_is_none_is_skipped(tmp_path: Path) -> None:
    wrong = changed(PLAYBOOK, batch={"grad_accum": 3}, result=FAILED)
    found = read(tmp_path, PLAYBOOK, wrong, changed(wrong, result=PLAYBOOK["result"]))
    assert isinstance(found[0], Published)
    assert isinstance(found[1], str)
    assert isinstance(found[2], Published)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([failing(32)], None),  # nothing tells why
        ([failing(32, "oom")], 0.0),  # said to be memory, and predicted
        ([failing(1, "oom")], 100.0),  # said to be memory, and predicted to fit
        ([PLAYBOOK, failing(32)], 0.0),  # the plan works with two samples, so memory it was
        ([PLAYBOOK, failing(1)], None),  # two samples fit, so one does
        ([PLAYBOOK, failing(2)], None),  # this very run came through elsewhere
        ([PLAYBOOK, failing(1, "oom"), failing(32)], 50.0),
        ([PLAYBOOK, failing(32, parallel={"zero": 1})], None),  # of another plan nothing is known
    ],
)
def test_only_failures_that_tell_of_memory_contradict(
    tmp_path: Path, rows: list[dict[str, Any]], expected: float | None
) -> None:
    assert judged(tmp_path, *rows)[-1].fit_contradictions == expected


def test_a_run_that_came_through_though_predicted_not_to_contradicts(tmp_path: Path) -> None:
    large = changed(PLAYBOOK, batch={"micro": 8, "grad_accum": 4}, result={"iter_s": 1.0})
    assert judged(tmp_path, PLAYBOOK, large)[0].fit_contradictions == 50.0


def test_a_plan_that_would_not_fit_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four, the one of eight samples is predicted fastest and not to fit."""
    micros = {1: 4.0, 2: 3.0, 4: 3.1, 8: 9.0}
    rows = [
        changed(PLAYBOOK, batch={"micro": micro, "grad_accum": 32 // micro}, result={"iter_s": seconds})
        for micro, seconds in micros.items()
    ]
    fast = {1: 4.0, 2: 2.5, 4: 2.6, 8: 1.0}
    monkeypatch.setattr(
        accuracy, "predict", lambda timed, _sets: accuracy.np.array([fast[row.setup["micro"]] for row in timed])
    )
    found = judged(tmp_path, *rows)[0]
    assert (found.regret_p90, found.regret_cells) == (0.0, 100.0)
    monkeypatch.setattr(accuracy, "probability_over", lambda *_: 0.0)
    found = judged(tmp_path, *rows)[0]
    assert found.regret_p90 == pytest.approx(200.0)
    assert found.regret_cells == 0.0
    # Where none is predicted to fit, the likeliest to is chosen.
    monkeypatch.setattr(accuracy, "probability_over", lambda memory, *_: 1 - 1 / memory)
    assert judged(tmp_path, *rows)[0].regret_p90 == pytest.approx(100 / 3)


def test_rows_without_times_or_memory_say_nothing_of_them(tmp_path: Path) -> None:
    found = judged(tmp_path, failing(32, "oom"))[0]
    assert (found.rows, found.time_mape, found.memory_mape, found.regret_p90) == (1, None, None, None)


def test_memory_errors_are_mean_and_median(tmp_path: Path) -> None:
    row = good(tmp_path, PLAYBOOK)[0]
    told = float(predict_memory([row])[0][0]) / 2**30
    rows = [changed(PLAYBOOK, result={"iter_s": 1.0, "mem_gb": told / (1 + off)}) for off in (0.0, 0.1, 0.5)]
    found = judged(tmp_path, *rows)[0]
    assert found.memory_mape == pytest.approx(20.0)
    assert found.memory_median_ape == pytest.approx(10.0)


def test_the_command_prints_and_writes_all_of_it(tmp_path: Path) -> None:
    path = written(tmp_path, PLAYBOOK, failing(32), LAYER)
    shown = CliRunner().invoke(app, ["plan", "--check", str(path)])
    assert shown.exit_code == 0, shown.output
    assert all(title in shown.output.splitlines()[0] for _, title in _COLUMNS)
    found = json.loads(CliRunner().invoke(app, ["plan", "--check", str(path), "--json"]).stdout)["sources"]
    sources = [PLAYBOOK["source"], failing(32)["source"], LAYER["source"]]
    assert [one["source"] for one in found] == sources
    assert found[0]["memory_mape"] < 8
    assert found[1]["fit_contradictions"] == 0.0
    assert found[2]["skipped"] == 1
    assert set(found[0]) >= {key for key, _ in _COLUMNS}
