"""The power fails at every point of a save: what was acknowledged is on the disk, not only in memory.

A kill leaves the system's write cache alive, so it can't tell whether anything was flushed. Here the
checkpoints lie on a file system inside an image file. A copy of the image holds what has reached the disk
and nothing else; mounted, it is the machine after the power came back. Needs root, loop devices and
mkfs.ext4, so it is outside CI.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from state_cuts import bits, snapshots, state_of_step
from stretto.checkpoint import COMMITTER_POINTS, MEMBER_POINTS, CheckpointWriter, newest_whole
from stretto.state import Box

CAN_MOUNT = os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None and Path("/dev/loop-control").exists()


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The file system inside the image; it flushes nothing by itself for 300 s."""
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop,commit=300", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def make_image(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)


@pytest.mark.chaos
@pytest.mark.skipif(not CAN_MOUNT, reason="needs root, loop devices and mkfs.ext4")
def test_what_was_acknowledged_survives_a_power_cut_at_every_point(tmp_path: Path) -> None:
    image, after = tmp_path / "image", tmp_path / "after"
    acknowledged: list[int] = []
    cuts: list[str] = []
    faults: list[str] = []

    def cut_power(point: str) -> None:
        if not acknowledged:
            return
        shutil.copyfile(image, after)
        cuts.append(point)
        with mounted(after, tmp_path / f"mount{len(cuts)}") as folder:
            checkpoint, _ = newest_whole(folder / "checkpoints")
            if checkpoint.step < acknowledged[-1]:
                faults.append(f"{point}: step {checkpoint.step} instead of {acknowledged[-1]}")
            for name, tensor in state_of_step(checkpoint.step).items():
                if bits(checkpoint.read(name, Box.whole(tensor.shape))) != bits(tensor):
                    faults.append(f"{point}: {name} differs")
            del checkpoint  # it holds files of the mount open

    make_image(image)
    with mounted(image, tmp_path / "disk") as disk:
        writer = CheckpointWriter(
            disk / "checkpoints", 1, cut_power, on_commit=lambda step, path: acknowledged.append(step)
        )
        for step in (10, 20, 20, 30):
            writer.save(snapshots(step, token=f"t{len(cuts)}")[0])
            writer.wait()
    assert faults == []
    assert {*MEMBER_POINTS, *COMMITTER_POINTS} == set(cuts)
