"""A disk that is full, or fails, in the middle of a save."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from state_cuts import save, snapshots
from stretto.checkpoint import MEMBER_POINTS, CheckpointWriter, Snapshot, newest_whole
from stretto.errors import CheckpointError
from stretto.state import Box, Slice, TensorSpec

LIMIT_BYTES = 2**20


def big_snapshot(step: int) -> Snapshot:
    """Twice what the disk holds."""
    data = torch.zeros(LIMIT_BYTES // 2)
    spec = TensorSpec.of("model/big", data)
    return Snapshot(step, "t", "m1", ("m1",), True, (Slice(spec, Box.whole(data.shape), data, owner=True),))


@contextlib.contextmanager
def file_size_limit() -> Iterator[None]:
    """No file of this process may grow past the limit; Python ignores SIGXFSZ, so that write() fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 1 MB mounted on the folder; where not allowed, a limit on the size of files."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={LIMIT_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        try:
            yield True
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    else:
        with file_size_limit():
            yield False


def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay_rs05(tmp_path: Path) -> None:
    with small_disk(tmp_path) as mounted:
        save(tmp_path, 10)
        writer = CheckpointWriter(tmp_path, keep=1)
        writer.save(big_snapshot(20))
        with pytest.raises(CheckpointError) as caught:
            writer.wait()
        reason = os.strerror(errno.ENOSPC if mounted else errno.EFBIG)
        assert f"cannot write checkpoint step-00000020 in {tmp_path}: {reason}; " in str(caught.value)
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
        assert newest_whole(tmp_path)[1] == []
        save(tmp_path, 30, keep=1)  # the room is free again
        assert newest_whole(tmp_path)[0].step == 30


def test_a_file_that_may_not_grow_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, 10)
    writer = CheckpointWriter(tmp_path, keep=1)
    with file_size_limit():
        writer.save(big_snapshot(20))
        with pytest.raises(
            CheckpointError, match=r"^cannot write checkpoint step-00000020 .*: File too large; [^\n]*$"
        ):
            writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_when_one_members_disk_fails_the_committer_gives_up_at_once_rs05(tmp_path: Path) -> None:
    """And says whose disk, long before the timeout."""
    save(tmp_path, 10)

    def fail(point: str) -> None:
        if point == "member-file-half":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    one, other = snapshots(20, num_members=2)
    committer, member = CheckpointWriter(tmp_path), CheckpointWriter(tmp_path, on_point=fail)
    member.save(other)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint step-00000020 .*: Input/output error"):
        member.wait()
    committer.save(one)
    with pytest.raises(CheckpointError, match=r"member m2 could not write its part: Input/output error"):
        committer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize("when", MEMBER_POINTS[:-1])  # at the last one the save may as well be whole
def test_a_member_of_a_save_that_was_given_up_is_silent(tmp_path: Path, when: str) -> None:
    """The committer's line is the cause; the members' would only hide it."""

    def give_up(point: str) -> None:
        if point == when:
            committer.cancel()
            committer.wait()

    one, other = snapshots(20, num_members=2)
    committer, member = CheckpointWriter(tmp_path), CheckpointWriter(tmp_path, on_point=give_up)
    committer.save(one)
    member.save(other)
    member.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints")
    writer.save(snapshots(1)[0])
    with pytest.raises(CheckpointError, match="Not a directory"):
        writer.wait()
