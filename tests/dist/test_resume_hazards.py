"""What breaks other systems when a run is saved under one plan and goes on under another, or is taken out whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from runs import Starter
from stretto.checkpoint import Checkpoint, newest_whole
from stretto.errors import CheckpointError
from stretto.launch import LocalLauncher
from stretto.plan import Plan
from stretto.preload import preloads
from stretto.state import Box
from stretto.task import load_task
from stretto.weights import export_weights, find_checkpoint, load_weights

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests" / "tasks" / "small_parts.py"


@pytest.fixture(scope="module")
def starter(launcher: LocalLauncher) -> Starter:
    return Starter(launcher)


@pytest.fixture(scope="module")
def whole(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    starter.good(run, SMALL, "dp=1")
    return run


@pytest.fixture(scope="module")
def stopped(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, sharded over four and stopped half-way."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    starter.good(run, SMALL, "dp=4,zero=3", stop=3)
    return run


def newest(run: Path) -> Checkpoint:
    return newest_whole(run / "checkpoints")[0]


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name, Box.whole(checkpoint.spec(name).shape)) for name in checkpoint.names()}


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=3", "dp=3,zero=3", "dp=4"])
def test_a_state_cut_for_four_goes_on_on_any_number_re04_re12_re20(
    starter: Starter, whole: Path, stopped: Path, tmp_path: Path, plan: str
) -> None:
    """Parameters of 7, 3 x 5, 1 x 5, 1 and 11 elements: weights, both moments and the step counts are those of one
    device, though some ranks held nothing of some of them."""
    shutil.copytree(stopped, tmp_path / "run")
    starter.good(tmp_path / "run", SMALL, plan, attempt=2)
    found, expected = tensors(newest(tmp_path / "run")), tensors(newest(whole))
    assert found.keys() == expected.keys()
    assert {"optimizer/main/one/exp_avg", "optimizer/main/row/exp_avg_sq", "model/seven"} <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)
    held = {tuple(slice_.stops) for slice_ in newest(stopped)._manifest.tensors["model/row"].pieces}
    assert held == {(1, 5)}, "one of the four had the only row, the others none of it"


def test_groups_keep_their_rates_and_another_order_is_refused_re08(
    starter: Starter, whole: Path, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    before = newest(tmp_path / "run").meta["groups"]
    assert [group["values"]["lr"] for group in before] == pytest.approx([0.01, 0.03, 0.005])
    result = starter.start(tmp_path / "run", SMALL, "dp=2,zero=3", attempt=2, order="cab")
    assert result.exit_code == 2 and result.failure is not None
    assert "optimizer groups hold other parameters than the task's optimizer()" in str(result.failure)
    assert newest(tmp_path / "run").step == 3, "nothing was changed"
    starter.good(tmp_path / "run", SMALL, "dp=2,zero=3", attempt=3)
    assert newest(tmp_path / "run").meta["groups"] == newest(whole).meta["groups"]


def test_each_file_is_written_by_one_rank_and_appears_by_a_rename_re06(starter: Starter, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = {"steps": 4, "save_every": 2}
    result = starter.good(run, SMALL, "dp=4", entry="audited_entries:writes", **sets)
    found = [rank for rank in result.results.values() if rank is not None]
    paths = [path for rank in found for path in set(rank["opened"])]
    assert len(paths) == len(set(paths)), "two ranks opened one file to write"
    assert len(paths) > 8, "each of four ranks has at least events, ledger and its part of two checkpoints"
    # What grows by whole lines is its member's own; whatever else there is was written aside.
    lines = re.compile(r"/(events|ledger)/(member-m\d+|starts)\.jsonl$|/logs/member-m\d+\.log$")
    aside = re.compile(r"/\.step-\d+\.partial-[^/]+/|/\.summary\.json\.\d+$|/trace/\.steps-\d+-\d+\.json\.\d+$")
    assert [path for path in paths if not lines.search(path) and not aside.search(path)] == []
    renamed = [target for rank in found for target in {pair[1] for pair in rank["renamed"]}]
    assert len(renamed) == len(set(renamed)), "two ranks gave one file its name"
    to = {Path(target).name for target in renamed}
    assert {"step-00000002", "step-00000004", "manifest.json", "summary.json", "steps-00000001-00000004.json"} <= to


def test_a_disk_full_on_one_rank_is_told_on_all_and_the_old_checkpoint_stays_rs05(
    starter: Starter, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = starter.start(run, SMALL, "dp=2", how="full disk", save_every=2, keep=1)
    assert result.exit_code == 2 and result.failure is not None and result.failure.kind == "user"
    reason = os.strerror(errno.ENOSPC)
    for log in (run / "logs").iterdir():
        told = log.read_text()
        assert reason in told and "step-00000004" in told and str(run / "checkpoints") in told, told
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    checkpoint = newest(run)
    assert checkpoint.step == 2
    checkpoint.verify()
    starter.good(run, SMALL, "dp=2", attempt=2, save_every=2, keep=1)  # there is room again
    assert newest(run).step == 6


# ----------------------------------------------------------------------------------------------- taking weights out


def test_weights_come_out_whole_under_plain_names_and_tied_re14_re18_sh02(
    starter: Starter, whole: Path, stopped: Path, tmp_path: Path
) -> None:
    """Of a run sharded over four, and of one device: the same names, which are those of the user's module."""
    task = load_task(SMALL)
    checkpoint, _ = find_checkpoint(stopped)
    exported = export_weights(checkpoint, tmp_path / "sharded.safetensors")
    alone = export_weights(newest(whole), tmp_path / "alone.safetensors")
    plain = task.model().double()
    wanted = plain.state_dict()
    assert exported.aliases == alone.aliases == {"last.weight": "first.weight"}
    for path in (exported.path, alone.path):
        assert load_file(path).keys() == wanted.keys() - {"last.weight"}, "no prefix, no buffer that is not kept"
    load_weights(plain, exported.path)
    assert plain.last.weight.data_ptr() == plain.first.weight.data_ptr(), "still tied"  # type: ignore[union-attr]
    for name, value in tensors(checkpoint).items():
        key = name.removeprefix("model/")
        if name.startswith("model/") and key in wanted:
            assert torch.equal(plain.state_dict()[key], value), name
    assert sum(parameter.numel() for parameter in plain.parameters()) == 7 + 15 + 5 + 1 + 11 + 25
    before = plain(torch.ones(2, 5, dtype=torch.float64))
    wrapped = nn.DataParallel(task.model().double())  # whoever wraps it loads into what was wrapped
    load_weights(wrapped.module, exported.path)
    torch.testing.assert_close(wrapped.module(torch.ones(2, 5, dtype=torch.float64)), before)


def test_shared_data_is_written_once_and_what_does_not_fit_is_named_re16(stopped: Path, tmp_path: Path) -> None:
    """A tied weight has one tensor in checkpoint and export; a buffer that is a view of another comes back by value."""
    checkpoint = newest(stopped)
    assert "model/first.weight" in checkpoint.names() and "model/last.weight" not in checkpoint.names()
    path = tmp_path / "weights.safetensors"
    exported = export_weights(checkpoint, path)
    content = sum(value.numel() * 8 for value in load_file(path).values())
    assert exported.num_bytes == path.stat().st_size < content + 2000
    module = load_task(SMALL).model().double()
    module.table.zero_(), module.part.zero_()  # type: ignore[operator, union-attr]
    load_weights(module, path)
    assert module.part.tolist() == [2.0, 3.0]
    with pytest.raises(CheckpointError, match="the model's 'weight' is not in it"):
        load_weights(nn.Linear(5, 5), path)
    module.eleven = nn.Linear(9, 1)
    with pytest.raises(CheckpointError, match=r"'eleven.weight' is \[1, 10\] in it, \[1, 9\] in the model"):
        load_weights(module, path)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 7; there is 3$"):
        find_checkpoint(stopped, 7)
    with pytest.raises(CheckpointError, match=r"cannot write .*: Not a directory$"):
        export_weights(checkpoint, path / "below")
    assert [each.name for each in tmp_path.iterdir()] == ["weights.safetensors"]


