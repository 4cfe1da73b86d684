"""SIGKILL at every point of a save and at random times: the newest committed checkpoint always loads.

Real processes save in a loop into one folder, trial after trial, each going on from the newest whole
checkpoint, as resumed runs do. What a member acknowledged (``on_commit``) must be there after any death.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from state_cuts import bits, snapshots, state_of_step
from stretto.checkpoint import (
    COMMITTER_POINTS,
    MEMBER_POINTS,
    CheckpointWriter,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
)
from stretto.errors import CheckpointError
from stretto.state import Box

GIVE_UP_SECONDS = 0.25


@dataclass(frozen=True)
class Kill:
    """One trial: who dies, in which of its saves at which point (None: after a random time)."""

    num_members: int
    victim: int
    point: str | None
    save: int
    delay_seconds: float = 0.0


def plan_kills(num_kills: int, seed: int) -> list[Kill]:
    """Every point with 1 member and with 3, each member as the victim, and random times; over and over."""
    draw = random.Random(seed)
    kills: list[Kill] = []
    while len(kills) < num_kills:
        for num_members in (1, 3):
            for victim in range(num_members):
                for point in MEMBER_POINTS + (() if victim else COMMITTER_POINTS):
                    # Only the first save of a trial repeats a step; the third surely has some to prune.
                    save = {"moved-aside": 0, "prune-hidden": 2}.get(point, draw.randrange(3))
                    kills.append(Kill(num_members, victim, point, save))
            for _ in range(6):
                kills.append(Kill(num_members, draw.randrange(num_members), None, 0, draw.uniform(0.0, 0.12)))
    return kills[:num_kills]


def member_life(folder: Path, token: str, begin: int, index: int, kill: Kill, acknowledge: int) -> None:
    """Saves ``begin`` (again), ``begin + 10``, ... until it is killed or sees that another one was."""
    step = begin
    passed = 0

    def on_point(point: str) -> None:
        if index == kill.victim and point == kill.point and passed == kill.save:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_commit(step: int, path: Path) -> None:
        os.write(acknowledge, f"{step}\n".encode())

    writer = CheckpointWriter(folder, 2, on_point, on_commit, GIVE_UP_SECONDS)
    for passed in count():
        save_token = f"{token}.{passed}"
        writer.save(snapshots(step, kill.num_members, save_token)[index])
        writer.wait()
        if index and not committed_in_time(folder, step, save_token):
            return
        step += 10


def committed_in_time(folder: Path, step: int, token: str) -> bool:
    """Waits for the committer, as a training step's vote would."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    partial = folder / f".step-{step:08d}.partial-{token}"
    while partial.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not partial.exists()


def fork(life: Callable[[], None]) -> int:
    """A child that lives that life; it only needs what is imported already."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        life()
        code = 0
    except CheckpointError:
        code = 0  # the committer gave a dead member's save up
    finally:
        os._exit(code)


def read_acknowledged(descriptor: int) -> list[int]:
    """All steps acknowledged, once every writing end is closed."""
    text = b""
    while select.select([descriptor], [], [], 20)[0]:
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return [int(line) for line in text.split()]
        text += chunk
    raise AssertionError("a member still runs after 20 s")


def run_trial(folder: Path, token: str, begin: int, kill: Kill) -> list[int]:
    """Forks the members, lets one die, waits for the others to end; the acknowledged steps."""
    reading, writing = os.pipe()
    pids = [
        fork(lambda index=index: member_life(folder, token, begin, index, kill, writing))  # type: ignore[misc]
        for index in range(kill.num_members)
    ]
    os.close(writing)
    if kill.point is None:
        time.sleep(kill.delay_seconds)
        os.kill(pids[kill.victim], signal.SIGKILL)
    try:
        acknowledged = read_acknowledged(reading)
    finally:
        os.close(reading)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    for index, status in enumerate(statuses):
        expected = -signal.SIGKILL if index == kill.victim else 0
        assert os.waitstatus_to_exitcode(status) == expected, (index, kill)
    return acknowledged


def check_folder(folder: Path, acknowledged: int, kill: Kill) -> int:
    """Every committed checkpoint is whole; the newest is as new as acknowledged and right to the bit."""
    for path in list_checkpoints(folder):
        open_checkpoint(path).verify()
    checkpoint, notes = newest_whole(folder)
    assert all("was never finished" in note for note in notes), (notes, kill)
    assert checkpoint.step >= acknowledged, kill
    for name, tensor in state_of_step(checkpoint.step).items():
        assert bits(checkpoint.read(name, Box.whole(tensor.shape))) == bits(tensor), (name, kill)
    return checkpoint.step


def run_kills(folder: Path, num_kills: int, seed: int) -> None:
    step = 10
    writer = CheckpointWriter(folder, keep=2)
    writer.save(snapshots(step)[0])
    writer.wait()
    last = step
    kills = plan_kills(num_kills, seed)
    for number, kill in enumerate(kills):
        last = max([last, *run_trial(folder, f"trial{number}", step, kill)])
        step = check_folder(folder, last, kill)
    assert last > 10 * len(kills) // 2, "the trials saved almost nothing"
    writer.save(snapshots(step + 1000, token="end")[0])
    writer.wait()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert len(list_checkpoints(folder)) == 2


@pytest.mark.timeout(180)
def test_the_newest_committed_checkpoint_loads_after_every_kill(tmp_path: Path) -> None:
    """One round: 58 kills."""
    kills = plan_kills(58, seed=1)
    assert {kill.point for kill in kills} == {*MEMBER_POINTS, *COMMITTER_POINTS, None}
    assert sum(kill.num_members > 1 for kill in kills) >= 30
    run_kills(tmp_path, len(kills), seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_more_kills(tmp_path: Path, seed: int) -> None:
    run_kills(tmp_path, 116, seed)
