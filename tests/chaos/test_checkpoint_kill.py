"""SIGKILL at every point of a save and at random times: the newest committed checkpoint always loads.

Real processes save in a loop into one folder, trial after trial, each going on from the newest whole
checkpoint, as resumed runs do. What a member acknowledged (``on_commit``) must be there after any death.
"""

from __future__ import annotations

import functools
import os
import random
import select
import signal
import threading
import time
import traceback
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
from stretto.state import Box

LONGEST_SECONDS = 20.0  # nothing takes so long; a member that waits longer has not heard of a death


@dataclass(frozen=True)
class Kill:
    """One trial: who dies, in which of its saves at which point (None: after a random time)."""

    num_members: int
    victim: int
    point: str | None
    save: int
    delay_seconds: float = 0.0


class Pipes:
    """To the test: acknowledged steps. From the test to all members: end of file at a death."""

    def __init__(self) -> None:
        self.acknowledge = os.pipe()
        self.death = os.pipe()


def plan_kills(num_kills: int, seed: int) -> list[Kill]:
    """Every point with 1 member and with 3, each member as victim, and random times; again and again."""
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


def member_life(folder: Path, token: str, begin: int, index: int, kill: Kill, pipes: Pipes) -> None:
    """Saves ``begin`` (again), ``begin + 10``, ... until it is killed or hears that another one was."""
    step = begin
    passed = 0
    death = threading.Event()

    def on_point(point: str) -> None:
        if index == kill.victim and point == kill.point and passed == kill.save:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_commit(step: int, path: Path) -> None:
        os.write(pipes.acknowledge[1], f"{step}\n".encode())

    def hear() -> None:
        os.read(pipes.death[0], 1)
        death.set()
        writer.cancel()

    os.close(pipes.death[1])
    writer = CheckpointWriter(folder, 2, on_point, on_commit, LONGEST_SECONDS)
    threading.Thread(target=hear, daemon=True).start()
    for passed in count():
        save_token = f"{token}.{passed}"
        writer.save(snapshots(step, kill.num_members, save_token)[index])
        if death.is_set():  # save() may have come after the cancel()
            writer.cancel()
        writer.wait()
        # The others wait for the committer, as a training step's vote would make them.
        while (folder / f".step-{step:08d}.partial-{save_token}").exists() and not death.wait(0.001):
            pass
        if death.is_set():
            return
        step += 10


def fork(life: Callable[[], None]) -> int:
    """A child that lives that life; it only needs what is imported already."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        life()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def read_acknowledged(descriptor: int) -> list[int]:
    """All steps acknowledged, once every writing end is closed."""
    text = b""
    while select.select([descriptor], [], [], LONGEST_SECONDS)[0]:
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return [int(line) for line in text.split()]
        text += chunk
    raise AssertionError("a member did not end after another one's death")


def run_trial(folder: Path, token: str, begin: int, kill: Kill) -> list[int]:
    """Forks the members, lets one die, tells the others, waits for their end; the acknowledged steps."""
    pipes = Pipes()
    pids = [
        fork(functools.partial(member_life, folder, token, begin, index, kill, pipes))
        for index in range(kill.num_members)
    ]
    os.close(pipes.acknowledge[1])
    os.close(pipes.death[0])
    if kill.point is None:
        time.sleep(kill.delay_seconds)
        os.kill(pids[kill.victim], signal.SIGKILL)
    statuses = {kill.victim: os.waitpid(pids[kill.victim], 0)[1]}
    os.close(pipes.death[1])
    try:
        acknowledged = read_acknowledged(pipes.acknowledge[0])
    finally:
        os.close(pipes.acknowledge[0])
        for index in set(range(kill.num_members)) - {kill.victim}:
            statuses[index] = os.waitpid(pids[index], 0)[1]
    for index, status in statuses.items():
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
    # A trial that dies in its save k has committed k before, the first again at the step it began with.
    assert step >= 10 + sum(10 * max(kill.save - 1, 0) for kill in kills)
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
