"""Runs whose samples come from loaders: the same stream on any plan, over any stop, whatever dies or changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import Starter
from stretto.elastic.ledger import audit
from stretto.launch import LocalLauncher
from stretto.observe.events import read_lines
from stretto.plan import Plan
from stretto.preload import preloads

TASKS = Path(__file__).resolve().parents[1] / "tasks"
STREAMS = TASKS / "streams.py"


@pytest.fixture(scope="module")
def starter(launcher: LocalLauncher) -> Starter:
    return Starter(launcher)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step; where one was taken twice, of the last time."""
    found = {}
    for path in sorted((run / "events").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        found.update({line["step"]: line["loss"] for line in read_lines(path) if line["kind"] == "step"})
    return found


def same_stream(run: Path, whole: Path) -> None:
    assert losses(run) == pytest.approx(losses(whole), rel=1e-12)
    report = audit(run)
    assert report.ok, report.faults


@pytest.mark.parametrize(
    ("sets", "plan", "stops"),
    [
        ({"length": 16, "steps": 24}, "dp=2,loaders=2", (5,)),  # three epochs, stopped three batches before the first's end
        ({"length": 40, "steps": 40, "val": 3, "eval_every": 4}, "dp=1,loaders=2", (6, 11, 15)),
        ({"length": 11, "steps": 13}, "dp=2,loaders=4,microbatches=2", (2, 4, 5)),  # saved before each loader was heard
    ],
)  # fmt: skip
def test_a_stream_goes_on_over_any_stop_re02_re22_re24_re26(
    starter: Starter, tmp_path: Path, sets: dict[str, Any], plan: str, stops: tuple[int, ...]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    starter.good(whole, STREAMS, "dp=1", **sets)
    for attempt, stop in enumerate((*stops, None), 1):
        starter.good(run, STREAMS, plan, attempt=attempt, stop=stop, **sets)
    same_stream(run, whole)
    assert len(losses(run)) == sets["steps"]


@pytest.mark.parametrize("plan", ["dp=2", "dp=3", "dp=2,loaders=2,microbatches=2"])
def test_a_batch_of_many_types_is_the_same_on_every_plan_ci02_ci06(
    starter: Starter, tmp_path: Path, plan: str
) -> None:
    """The task itself insists on them in inputs, forward and loss."""
    starter.good(tmp_path / "whole", TASKS / "any_tree.py", "dp=1")
    starter.good(tmp_path / "run", TASKS / "any_tree.py", plan)
    same_stream(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("plan", "samples", "batch", "index"),
    [
        ("dp=3,loaders=1", 10, 4, 4.5),
        ("dp=2,loaders=1", 7, 2, 3.0),
        ("dp=2", 7, 7, 3.0),
        ("dp=2,loaders=9", 1, 2, 0.0),
    ],
)
def test_an_evaluation_is_the_mean_of_its_samples_da09_da11_da13(
    starter: Starter, tmp_path: Path, plan: str, samples: int, batch: int, index: float
) -> None:
    """Of whole numbers too. Ranks hold 4 and 3 samples, or 1 and none; batches 4 and 2, or 2 and 1."""
    result = starter.good(tmp_path / "run", STREAMS, plan, val=samples, batch=batch, steps=1)
    found = next(iter(result.results.values()))["evaluation"]
    assert (found["index"], found["one"]) == (index, 1.0)


@pytest.mark.parametrize(
    ("plan", "sets"),
    [
        ("dp=6", {"length": 20, "steps": 10}),
        ("dp=2,loaders=2", {"length": 1, "steps": 3}),
        ("dp=2,loaders=2", {"length": 3, "steps": 4, "batch": 8}),
    ],
)
def test_ranks_without_data_keep_step_hg11_hg19_hg21(
    starter: Starter, tmp_path: Path, plan: str, sets: dict[str, Any]
) -> None:
    """More ranks than samples in a batch, than samples at all, and a batch that is larger than the dataset."""
    starter.good(tmp_path / "whole", STREAMS, "dp=1", **sets)
    starter.good(tmp_path / "run", STREAMS, plan, **sets)
    same_stream(tmp_path / "run", tmp_path / "whole")
    counts = [len(read_lines(path)) for path in (tmp_path / "run" / "ledger").glob("member-*.jsonl")]
    assert counts == [sets["steps"]] * Plan.parse(plan).world_size


def test_ranks_that_see_different_data_are_stopped_hg01(starter: Starter, tmp_path: Path) -> None:
    text = starter.bad(tmp_path / "run", STREAMS, "dp=3", how="by rank")
    assert "'train' is 16 on rank 0, 17 on rank 1, 18 on rank 2" in text and "\n" not in text


def test_a_split_without_a_sample_is_one_line_at_launch(starter: Starter, tmp_path: Path) -> None:
    assert "data()['train'] is empty" in starter.bad(tmp_path / "one", STREAMS, "dp=2", length=0)
    assert "data()['val'] is empty" in starter.bad(tmp_path / "two", STREAMS, "dp=1", how="empty")


def test_data_that_changed_length_is_refused_within_an_epoch(starter: Starter, tmp_path: Path) -> None:
    starter.good(tmp_path / "run", STREAMS, "dp=2", stop=11)  # eight batches an epoch
    text = starter.bad(tmp_path / "run", STREAMS, "dp=2", attempt=2, length=18)
    assert "had 16 samples and has 18 now, and epoch 1 stands at sample 6" in text and "\n" not in text
    starter.good(tmp_path / "run", STREAMS, "dp=1", attempt=3)


def test_data_may_have_changed_length_at_the_end_of_an_epoch(starter: Starter, tmp_path: Path) -> None:
    starter.good(tmp_path / "run", STREAMS, "dp=2", stop=8)
    starter.good(tmp_path / "run", STREAMS, "dp=2,loaders=1", attempt=2, stop=17, length=18)
    assert "data()['train'] had 16 samples and has 18 from epoch 1 on" in starter.notes
    starter.good(tmp_path / "run", STREAMS, "dp=1", attempt=3, length=12)
    report = audit(tmp_path / "run")
    assert report.ok, report.faults
    assert [epoch.seen for epoch in report.epochs] == [16, 18, 12, 2]


def test_a_dataset_that_grows_in_a_run_is_told_at_the_next_epoch(starter: Starter, tmp_path: Path) -> None:
    text = starter.bad(tmp_path / "run", STREAMS, "dp=2", how="grows")
    assert "had 16 samples when the run started and has 17 now" in text and "\n" not in text


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,loaders=2"])
def test_an_error_in_a_sample_is_told_whole_and_last(starter: Starter, tmp_path: Path, plan: str) -> None:
    """Its words are those of a lost peer, which must not make it a consequence of another failure."""
    text = starter.bad(tmp_path / "run", STREAMS, plan, how="raise").rstrip().splitlines()
    assert text[-2] == "RuntimeError: connection reset by a planted fault"
    assert text[-1] == "stretto: this was sample 5 of the dataset, in epoch 0"
    assert any("streams.py" in line and "__getitem__" in line for line in text[-6:]), text


@pytest.mark.parametrize(
    ("how", "says"),
    [("SIGKILL", "out-of-memory killer is a possible cause: use fewer loaders"), ("SIGBUS", "/dev/shm has ")],
)
def test_a_loader_that_dies_is_named_rs07(starter: Starter, tmp_path: Path, how: str, says: str) -> None:
    text = starter.bad(tmp_path / "run", STREAMS, "dp=2,loaders=2", how=how)
    number = getattr(signal, how)
    assert " of 2 (process " in text and f"was killed by signal {number} ({how}) over 1 sample(s)" in text
    assert says in text and "\n" not in text


def test_a_signal_to_everyone_lets_the_rank_save_la10(starter: Starter, tmp_path: Path) -> None:
    """Loaders hear it too, and still serve their rank up to its safe point; the run then goes on exactly."""
    run, pids = tmp_path / "run", tmp_path / "pids"
    pids.mkdir()
    sets = {"length": 40, "steps": 60}
    slow = [f"--set={key}={value}" for key, value in {**sets, "pause": 0.02, "pids": pids}.items()]
    command = [sys.executable, "-m", "stretto", "train", str(STREAMS), "--plan", "dp=2,loaders=2", "--run", str(run)]
    with subprocess.Popen([*command, *slow], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while len(losses(run)) < 4:
            assert process.poll() is None
            time.sleep(0.05)
        told = [path.name for path in pids.iterdir()]  # the probe's too, which took samples before the launch
        loaders = [int(pid) for pid in told if Path(f"/proc/{pid}").exists()]
        for pid in (*loaders, process.pid, *loaders):
            os.kill(pid, signal.SIGTERM)
            if pid in loaders:
                os.kill(pid, signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert len(loaders) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in loaders)
    stopped = len(losses(run))
    assert 4 <= stopped < 60 and (run / "checkpoints" / f"step-{stopped:08}" / "manifest.json").is_file()
    starter.good(run, STREAMS, "dp=2,loaders=2", attempt=2, **sets)
    starter.good(tmp_path / "whole", STREAMS, "dp=1", **sets)
    same_stream(run, tmp_path / "whole")
