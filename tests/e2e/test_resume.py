"""A run goes on under any other plan and number of workers, anywhere in an epoch, and has the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runs import Starter
from stretto.elastic.ledger import audit
from stretto.launch import LocalLauncher
from stretto.observe.events import read_lines

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "examples" / "gpt"
ODD = ROOT / "tests" / "tasks" / "odd_parts.py"
LSTM = ROOT / "tests" / "tasks" / "lstm.py"
TINY = {
    "depth": 2,
    "width": 32,
    "context": 16,
    "heads": 2,
    "batch": 7,
    "steps": 30,
    "precision": "fp64",
    "eval_every": 0,
}
SMALL = {"length": 23, "batch": 4, "steps": 30, "counts": False}  # six batches an epoch, the last one short


@pytest.fixture(scope="module")
def starter(launcher: LocalLauncher) -> Starter:
    return Starter(launcher)


@pytest.fixture(scope="module")
def undisturbed(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    folders = {}
    for task, sets in ((GPT, TINY), (ODD, SMALL)):
        folders[task] = tmp_path_factory.mktemp("whole") / "run"
        starter.good(folders[task], task, "dp=1", **sets)
    return folders


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """The last event of each step, by step."""
    found = {}
    for path in sorted((run / "events").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        found.update({line["step"]: line for line in read_lines(path) if line["kind"] == "step"})
    return found


def same(run: Path, whole: Path) -> None:
    found, expected = steps(run), steps(whole)
    assert found.keys() == expected.keys() == set(range(1, 31))
    for step in expected:
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-12), step
        assert found[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-11), step
        assert found[step]["learning_rate"] == expected[step]["learning_rate"], step


@pytest.mark.parametrize(
    ("task", "sets", "plans"),
    [
        (GPT, TINY, ("dp=2", "dp=3,zero=3", "dp=1")),
        pytest.param(GPT, TINY, ("dp=2,zero=3", "dp=3", "dp=2,zero=3"), marks=pytest.mark.matrix),
        (ODD, SMALL, ("dp=2,zero=3", "dp=3", "dp=1,zero=3")),
        (ODD, SMALL, ("dp=1", "dp=2,zero=3,microbatches=2", "dp=3")),
        pytest.param(GPT, TINY, ("dp=3,zero=1", "dp_replicate=2,dp_shard=2", "dp=2,zero=2"), marks=pytest.mark.matrix),
        (ODD, SMALL, ("dp=2,zero=2", "dp=4,zero=1", "dp_replicate=2,dp_shard=2")),
    ],
)
def test_a_resumed_run_goes_on_as_if_nothing_had_been_re04_re12(
    starter: Starter, undisturbed: dict[Path, Path], tmp_path: Path, task: Path, sets: dict[str, Any], plans: list[str]
) -> None:
    run = tmp_path / "run"
    starter.good(run, task, plans[0], stop=7, **sets)
    starter.good(run, task, plans[1], attempt=2, stop=17, **sets)
    starter.good(run, task, plans[2], attempt=3, **sets)
    same(run, undisturbed[task])
    report = audit(run)
    assert report.ok, report.faults
    assert all(epoch.missing == epoch.repeated == 0 for epoch in report.epochs)
    assert sum(epoch.seen for epoch in report.epochs) == sum(line["samples"] for line in steps(run).values())
    names = [path.name for path in run.rglob("*")]
    assert "member-m11.jsonl" in names, "files are named by member"
    assert not any("rank" in name for name in names)


@pytest.mark.parametrize(("precision", "plan"), [("fp16", "dp=2,zero=1"), ("bf16", "dp=2,zero=3"), ("fp16", "dp=2")])
def test_a_low_precision_goes_on_to_the_bit_re10(starter: Starter, tmp_path: Path, precision: str, plan: str) -> None:
    """Float32 masters, moments, the loss scale and its count of good steps are kept, not made anew from the copies."""
    sets = {"precision": precision, "steps": 12}
    starter.good(tmp_path / "whole", LSTM, plan, **sets)
    starter.good(tmp_path / "run", LSTM, plan, stop=7, **sets)
    starter.good(tmp_path / "run", LSTM, plan, attempt=2, **sets)
    ends = []
    for run in (tmp_path / "whole", tmp_path / "run"):
        manifest = json.loads((run / "checkpoints" / "step-00000012" / "manifest.json").read_text())
        tensors = {name: tensor["digest"] for name, tensor in manifest["tensors"].items()}
        assert any(name.startswith("optimizer/main/") for name in tensors)
        assert {tensor["dtype"] for tensor in manifest["tensors"].values()} == {"float32"}
        ends.append((tensors, manifest["meta"]["loss_scale"], [line["loss"] for line in steps(run).values()]))
    assert ends[0] == ends[1]
    assert (ends[0][1] is not None) == (precision == "fp16")


def test_digests_do_not_depend_on_the_plan(starter: Starter, tmp_path: Path) -> None:
    """The same initial state under three plans: one digest a tensor."""
    found = []
    for plan in ("dp=1", "dp=2,zero=3", "dp=3", "dp=2,zero=1"):
        run = tmp_path / plan
        starter.good(run, ODD, plan, **{**SMALL, "lr": 0.0, "decay": 0.0, "steps": 1})
        manifest = json.loads((run / "checkpoints" / "step-00000001" / "manifest.json").read_text())
        found.append({n: t["digest"] for n, t in manifest["tensors"].items() if n.startswith("model/")})
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) == 9


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    starter: Starter, undisturbed: dict[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sets = {**SMALL, "save_every": 5, "keep": 3}
    starter.good(run, ODD, "dp=2", stop=13, **sets)
    newest = run / "checkpoints" / "step-00000013"
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x10
    file.write_bytes(content)
    starter.good(run, ODD, "dp=3,zero=3", attempt=2, **sets)
    assert any("step-00000013" in note and "step-00000010" in note for note in starter.notes), starter.notes
    same(run, undisturbed[ODD])
    assert audit(run).ok, "steps 11 to 13 of the first start are void"


def test_an_audit_sees_what_the_ledger_says(starter: Starter, undisturbed: dict[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed[ODD], run)
    ledger = next((run / "ledger").glob("member-*.jsonl"))
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines[:3], lines[3].replace('"ids":[', '"ids":[0,'), *lines[4:]]))
    report = audit(run)
    assert not report.ok
    assert report.epochs[0].repeated == 1
    ledger.write_text("".join(lines[:3] + lines[4:]))
    report = audit(run)
    assert not report.ok
    assert report.epochs[0].missing == 4
