"""Loaders: the same samples as without them, in any order, and no trace of them afterwards."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from stretto.data import Feeder, Position, Sampler, cut, open_feeders
from stretto.data.loader import SampleError
from stretto.errors import LoaderError, TaskError


class Drawing(Dataset[Any]):
    """A sample is its id and a number of each global generator; ``how`` strikes at sample 3."""

    def __init__(self, length: int = 16, how: str = "") -> None:
        self.length, self.how = length, how

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.how == "task":
            raise TaskError("a mistake of the user's")
        if index == 3 and self.how == "lambda":
            return lambda: 1
        if index == 3 and self.how == "exit":
            sys.exit(4)
        if index == 3 and self.how == "hang":
            time.sleep(600)
        return index, float(torch.rand(())), float(numpy.random.rand()), random.random(), os.getpid()


def plain(samples: list[Any]) -> list[Any]:
    return samples


@contextmanager
def feeding(loaders: int, dataset: Any = None, val: Any = None) -> Iterator[dict[str, Feeder]]:
    datasets = {"train": dataset or Drawing()} | ({"val": val} if val is not None else {})
    feeders = open_feeders(datasets, plain, 7, loaders)
    assert len(children()) == loaders
    try:
        yield feeders
    finally:
        for feeder in feeders.values():
            feeder.close()
        assert children() == [], "loaders are gone, and reaped, when close returns"


def children() -> list[int]:
    """Processes forked from this one: they are called as it is, unlike those that other tests have started."""
    mine = Path("/proc/self/cmdline").read_bytes()
    found = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in found if Path(f"/proc/{pid}/cmdline").read_bytes() in (mine, b"")]


def numbers(samples: list[Any]) -> list[Any]:
    return [sample[:4] for sample in samples]


def pieces(epochs: int, length: int = 16, microbatches: int = 2) -> list[tuple[tuple[int, ...], int]]:
    """What two ranks are fed over some epochs, one after the other."""
    found = []
    for rank in range(2):
        for batch in Sampler(length, 5, 7).batches(1, Position()):
            if batch.start.epoch == epochs:
                break
            found += [(piece.ids, batch.start.epoch) for piece in cut(batch.ids, 2, microbatches, rank)]
    return found


@pytest.mark.parametrize("loaders", [1, 3])
def test_loaders_never_matter_da01_da03_da05(loaders: int) -> None:
    """Three epochs of three orders, every sample once in each; no number is ever drawn twice."""
    wanted = pieces(epochs=3)
    with feeding(0) as here, feeding(loaders) as there:
        there["train"].expect(wanted)
        expected = [numbers(here["train"].get(*piece)) for piece in wanted]
        fetched = [there["train"].get(*piece) for piece in wanted]
        assert [numbers(samples) for samples in fetched] == expected
        assert len({sample[4] for samples in fetched for sample in samples} - {os.getpid()}) == loaders
    orders = [list(Sampler(16, 5, 7).order(epoch)) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    every = [sample[:4] for samples in fetched for sample in samples]
    assert {sample[0] for sample in every} == set(range(16))
    for place in (1, 2, 3):
        assert len({sample[place] for sample in every}) == 3 * 16, "by sample and epoch, and not by rank or loader"


def test_what_is_asked_for_is_what_comes_whatever_was_announced() -> None:
    """Steps done anew, evaluations in between, another order after a resume: nothing is lost, repeated or mixed up."""
    wanted = pieces(epochs=2)
    with feeding(0, val=Drawing(4)) as here, feeding(2, val=Drawing(4)) as there:

        def same(split: str, ids: tuple[int, ...], epoch: int | str) -> None:
            assert numbers(there[split].get(ids, epoch)) == numbers(here[split].get(ids, epoch))

        there["train"].expect(iter(wanted))
        for piece in (*wanted[:3], wanted[2], wanted[1], wanted[2], *wanted[3:5]):
            same("train", *piece)
        there["val"].expect(((index,), "evaluate") for index in range(4))
        for index in range(4):
            same("val", (index,), "evaluate")
        for piece in (wanted[9], *wanted[5:9]):
            same("train", *piece)
        there["train"].expect(iter(wanted[2:]))
        for piece in wanted[2:]:
            same("train", *piece)
        same("train", (0, 0, 0), 5)


def test_two_ghosts_of_one_sample_are_two_batches() -> None:
    """Microbatches without samples run the same one; each gets tensors of its own to write into."""
    with feeding(2) as feeders:
        feeders["train"].expect([((0,), 0)] * 3)
        found = [feeders["train"].get((0,), 0) for _ in range(3)]
        assert numbers(found[0]) == numbers(found[1]) == numbers(found[2])
        assert len({sample[4] for samples in found for sample in samples}) == 2, "each was fetched, by two loaders"


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("two\nlines")
        return super().__getitem__(index)


def test_an_error_comes_from_the_loader_as_it_was() -> None:
    with feeding(1, Failing()) as feeders, pytest.raises(SampleError) as caught:
        feeders["train"].expect([((index,), 0) for index in range(4)])
        for index in range(4):
            feeders["train"].get((index,), 0)
    lines = str(caught.value).splitlines()
    assert lines[2] == "Traceback (most recent call last):" and "__getitem__" in lines[3]
    assert lines[-3:] == ["ValueError: two", "lines", "stretto: this was sample 3 of the dataset, in epoch 0"]


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("task", TaskError, "a mistake of the user's"),
        ("lambda", LoaderError, "can't be sent to another process"),
        ("exit", LoaderError, "loader 1 of 1 (process"),
    ],
)
def test_what_a_user_can_mend_is_one_line(how: str, kind: type[Exception], says: str) -> None:
    with feeding(1, Drawing(how=how)) as feeders, pytest.raises(kind) as caught:
        feeders["train"].get((2, 3), 0)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_death_is_known_at_once_and_told_in_one_line_rs07() -> None:
    """Though another loader is the one that is waited for, and would keep its rank waiting for ever."""
    with feeding(2, Drawing(how="hang")) as feeders:
        feeders["train"].expect([((3,), 0), ((5, 6, 7, 8, 9), 4)])
        _, second = children()
        time.sleep(0.2)
        os.kill(second, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(LoaderError) as caught:
            feeders["train"].get((3,), 0)
        assert time.monotonic() - began < 2
    said = str(caught.value)
    assert f"loader 2 of 2 (process {second}) was killed by signal 9 (SIGKILL)" in said
    assert "out-of-memory killer is a possible cause" in said and "\n" not in said


def test_a_death_while_the_rank_computes_is_told_at_the_next_request() -> None:
    with feeding(1) as feeders:
        feeders["train"].get((1,), 0)
        os.kill(children()[0], signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(LoaderError, match="loader 1 of 1"):
            feeders["train"].get((2,), 0)


def test_loaders_are_deaf_to_signals_that_are_meant_for_the_rank_la10() -> None:
    with feeding(2) as feeders:
        for pid in children():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for index in range(6):
            assert feeders["train"].get((index,), 0)[0][0] == index


def test_a_killed_rank_takes_its_loaders_along() -> None:
    """Outside any launcher of ours; one loader is busy, one waits, one is stopped."""
    program = (
        "import sys, time; sys.path[:0] = sys.argv[1:]; from test_feeder import *\n"
        "feeders = open_feeders({'train': Drawing(how='hang')}, plain, 7, 3)\n"
        "feeders['train'].expect([((index,), 0) for index in range(3)])\n"
        "begun = {feeders['train'].get((index,), 0)[0][-1] for index in range(3)}\n"
        "assert begun == set(children())\n"  # one that is stopped before it has begun would stay
        "feeders['train'].expect([((3,), 0)])\n"
        "print(*children(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        loaders = [int(pid) for pid in process.stdout.readline().split()]
        assert len(loaders) == 3
        os.kill(loaders[2], signal.SIGSTOP)
        process.kill()
    deadline = time.monotonic() + 20  # those that live on would do so for 600 s
    while any(running(pid) for pid in loaders):
        assert time.monotonic() < deadline, loaders
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Large(Drawing):
    """Two tensors a sample: a label and, of the first 400, one that is handed over in a file of its own."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.full((300_000 if index < 400 else 1,), index % 100, dtype=torch.uint8)


def test_kept_tensors_hold_no_files_open_rs09() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with feeding(2, Large(2000)) as feeders:
            feeders["train"].expect(((index,), 0) for index in range(2000))
            kept = []
            for index in range(2000):
                [(label, large)] = feeders["train"].get((index,), 0)
                kept += [label, large]
            assert sum(int(each) for each in kept if not each.ndim) == sum(range(2000))
            assert all(int(each[-1]) < 100 for each in kept if each.ndim)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_dev_shm_does_not_matter_rs07() -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
    isolated = ["unshare", "-Urm", "sh", "-c"]
    if subprocess.run([*isolated, f"{mount} true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; from test_feeder import *\n"
        "feeder = open_feeders({'train': Large(40)}, plain, 7, 2)['train']\n"
        "feeder.expect([(tuple(range(20)), 0), (tuple(range(20, 40)), 0)])\n"
        "print(sum(int(large[5]) for epoch in (0, 0) for _, large in feeder.get(tuple(range(20)), 0)))"
    )
    command = f'{mount} exec "{sys.executable}" -c "$1" "$2"'
    done = subprocess.run(
        [*isolated, command, "sh", program, str(Path(__file__).parent)], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == f"{2 * sum(range(20))}\n", done.stderr


def test_a_dataset_that_has_shrunk_is_told_by_sample_and_length() -> None:
    dataset = Shrinking(16)
    feeder = Feeder(dataset, plain, 7)
    feeder.get((9,), 0)
    dataset.length = 8
    with pytest.raises(TaskError, match=r"no sample 9 any more, as the dataset's length is 8 now"):
        feeder.get((9,), 0)
    with pytest.raises(TaskError, match=r"had 16 samples when the run started and has 8 now"):
        feeder.get((1,), 1)


class Shrinking(Drawing):
    def __getitem__(self, index: int) -> Any:
        return list(range(self.length))[index]


def test_an_index_error_of_the_programs_own_keeps_its_traceback() -> None:
    class Broken(Drawing):
        def __getitem__(self, index: int) -> Any:
            return [][index]

    with pytest.raises(IndexError) as caught:
        Feeder(Broken(), plain, 7).get((2,), "evaluate")
    assert caught.value.__notes__ == ["stretto: this was sample 2 of the dataset, in epoch evaluate"]
