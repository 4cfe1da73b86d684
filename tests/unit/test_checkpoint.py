"""Saving and reading: any cut to any other cut, the commit, what stays, and how long training waits."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from state_cuts import DTYPES, bits, cut_slices, cuts, random_tensor, save, shapes, snapshots, state_of_step
from stretto.checkpoint import (
    COMMITTER_POINTS,
    MEMBER_POINTS,
    CheckpointWriter,
    Snapshot,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
    snapshot_slices,
    sweep,
)
from stretto.checkpoint.tensorfile import TensorFile
from stretto.errors import CheckpointError
from stretto.state import Box, MemorySource, Slice, TensorSpec
from stretto.state.digest import format_digest, partial_digest


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return [open_checkpoint(path).step for path in list_checkpoints(folder)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_written_under_any_cut_it_is_read_under_any_other(data: st.DataObject) -> None:
    """Every element type and shape, over 1 to 3 members."""
    members = tuple(f"m{index}" for index in range(data.draw(st.integers(1, 3))))
    tensors = {
        f"model/p{index}": random_tensor(data.draw(shapes()), data.draw(st.sampled_from(DTYPES)), index)
        for index in range(3)
    }
    memory, held = MemorySource(tensors), {member: list[Slice]() for member in members}
    for name, tensor in tensors.items():
        for piece in cut_slices(memory, name, data.draw(cuts(tuple(tensor.shape)))):
            held[data.draw(st.sampled_from(members))].append(piece)
    with tempfile.TemporaryDirectory() as folder:
        writers = [CheckpointWriter(Path(folder)) for _ in members]
        for writer, member in zip(writers, members, strict=True):
            writer.save(Snapshot(7, "t", member, members, member == "m0", tuple(held[member])))
        for writer in writers:
            writer.wait()
        checkpoint = open_checkpoint(Path(folder) / "step-00000007")
        checkpoint.verify()
        assert set(checkpoint.names()) == set(tensors)
        for name, tensor in tensors.items():
            whole = Box.whole(tensor.shape)
            assert checkpoint.spec(name) == memory.spec(name)
            expected = format_digest(memory.spec(name), partial_digest(tensor, whole, whole.shape))
            assert checkpoint.digest(name) == expected
            for box in data.draw(cuts(whole.shape)):
                assert bits(checkpoint.read(name, box)) == bits(memory.read(name, box))


@pytest.mark.parametrize("num_before", range(4))
def test_complex_numbers_are_read_from_any_place_in_a_file(tmp_path: Path, num_before: int) -> None:
    """A complex128 that does not lie on 16 bytes ends the process; another program may have put it on 8."""
    number = torch.randn(3, 2, dtype=torch.complex128)
    before = torch.zeros(num_before, dtype=torch.float64)
    path = tmp_path / "other.safetensors"
    save_file({"a": before, "b": torch.view_as_real(number)}, path)
    spec, file = TensorSpec.of("b", number), TensorFile(path)
    for rows in ((0, 3), (1, 2), (2, 3)):
        assert torch.equal(file.read("b", spec, (slice(*rows), slice(1, 2))) * 2, number[slice(*rows), 1:2] * 2)
    memory = MemorySource({"model/a": before, "model/b": number})
    pieces = [
        piece for name in memory.names() for piece in cut_slices(memory, name, [Box.whole(memory.spec(name).shape)])
    ]
    writer = CheckpointWriter(tmp_path)
    writer.save(Snapshot(1, "t", "m1", ("m1",), True, tuple(pieces)))
    writer.wait()
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    assert torch.equal(checkpoint.read("model/b", Box((1, 0), (3, 2))) * 2, number[1:] * 2)


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1))
    box = Box.whole((7, 5))
    checkpoint.read("model/weight", box).fill_(0)
    assert torch.equal(checkpoint.read("model/weight", box), state_of_step(1)["model/weight"])


def test_the_folder_is_plain_files_that_others_can_read(tmp_path: Path) -> None:
    path = save(tmp_path, 100, num_members=2, note="hello", loss=float("nan"), big=2**70)
    assert names(tmp_path) == ["step-00000100"]
    assert names(path) == ["manifest.json", "member-m1.safetensors", "member-m2.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["members"] == ["m1", "m2"]
    with safe_open(str(path / "member-m1.safetensors"), framework="pt") as file:
        assert torch.equal(file.get_tensor("model/weight [0:3, 0:5]"), state_of_step(100)["model/weight"][:3])
        assert torch.equal(file.get_tensor("generator/torch [0:32]"), state_of_step(100)["generator/torch"][:32])
    meta = open_checkpoint(path).meta
    assert (meta["note"], meta["big"], str(meta["loss"])) == ("hello", 2**70, "nan")


def test_digests_do_not_depend_on_the_number_of_members(tmp_path: Path) -> None:
    paths = [save(tmp_path / str(num), 5, num_members=num) for num in (1, 2, 3)]
    digests = [{name: c.digest(name) for name in c.names()} for c in map(open_checkpoint, paths)]
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) == len(state_of_step(5))


def test_unknown_names_get_the_nearest_offered(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="did you mean 'model/weight'"):
        open_checkpoint(save(tmp_path, 1)).spec("model/wieght")


def test_only_owned_slices_are_copied_and_the_copies_are_private() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    memory = MemorySource({"w": tensor, "b": tensor})
    view = Slice(memory.spec("w"), Box((0, 1), (3, 3)), tensor[:, 1:3], owner=True)
    (copy,) = snapshot_slices([view, Slice(memory.spec("b"), Box.whole((3, 4)), tensor, owner=False)])
    tensor.fill_(0)
    assert copy.data.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert copy.data.is_contiguous()


def test_save_returns_while_the_write_is_held_up(tmp_path: Path) -> None:
    """Training waits for the copy only: the write stands still half-way until the test lets it go on."""
    go, reached = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "member-file-half":
            reached.set()
            assert go.wait(30)

    committed: list[tuple[int, Path]] = []
    writer = CheckpointWriter(tmp_path, on_point=hold, on_commit=lambda step, path: committed.append((step, path)))
    begin = time.perf_counter()
    writer.save(snapshots(3)[0])
    seconds = time.perf_counter() - begin
    assert reached.wait(30)
    assert writer.busy
    assert (list_checkpoints(tmp_path), committed) == ([], [])
    go.set()
    writer.wait()
    assert not writer.busy
    assert committed == [(3, tmp_path / "step-00000003")]
    assert seconds < 5  # not the 30 s of the held write; the copy itself takes a millisecond


def test_what_the_caller_alters_after_save_is_not_saved(tmp_path: Path) -> None:
    """The loop goes on changing run.state, which is the meta it handed over."""
    go = threading.Event()
    writer = CheckpointWriter(tmp_path, on_point=lambda point: assert_true(go.wait(30)))
    state = {"count": 1}
    writer.save(snapshots(1, state=state)[0])
    state["count"] = 2
    go.set()
    writer.wait()
    assert open_checkpoint(tmp_path / "step-00000001").meta == {"state": {"count": 1}}


def assert_true(value: bool) -> None:
    assert value


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """One copy of the state in memory, not one a save."""
    go, order = threading.Event(), list[str]()

    def hold(point: str) -> None:
        if point == "renamed":
            assert go.wait(30)
            order.append("renamed")

    writer = CheckpointWriter(tmp_path, on_point=hold)
    writer.save(snapshots(1)[0])
    threading.Timer(0.2, go.set).start()
    writer.save(snapshots(2)[0])
    order.append("second save began")
    writer.wait()
    assert order == ["renamed", "second save began", "renamed"]
    assert steps(tmp_path) == [2, 1]


def test_points_are_passed_in_the_order_they_are_listed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    passed: list[str] = []
    writer = CheckpointWriter(tmp_path, keep=1, on_point=passed.append)
    writer.save(snapshots(2, token="again")[0])
    writer.wait()
    assert tuple(passed) == MEMBER_POINTS + COMMITTER_POINTS


def test_the_commit_waits_for_every_member(tmp_path: Path) -> None:
    first, second = CheckpointWriter(tmp_path), CheckpointWriter(tmp_path)
    one, other = snapshots(4, num_members=2)
    first.save(one)
    time.sleep(0.2)
    assert first.busy
    assert list_checkpoints(tmp_path) == []
    second.save(other)
    second.wait()
    first.wait()
    assert steps(tmp_path) == [4]


def test_a_member_that_does_not_come_is_named_and_nothing_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, keep=1, timeout_seconds=0.1)
    writer.save(snapshots(2, num_members=3)[0])
    with pytest.raises(CheckpointError, match=r"step-00000002 was given up: member m2, m3 had not written"):
        writer.wait()
    writer.wait()  # an error is raised once
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_appears_by_one_rename_re18(tmp_path: Path) -> None:
    """Of all that Python asks of the system in a save, one rename touches the checkpoint's own name."""
    touched: list[tuple[str, ...]] = []
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:  # an audit hook stays for the process's life
        if watching and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.truncate"):
            text = tuple(str(argument) for argument in arguments)
            if any("/step-" in part for part in text):
                touched.append((event, *text[:2]))

    sys.addaudithook(hook)
    writer = CheckpointWriter(tmp_path, keep=1)
    for step in (1, 2):
        for snapshot in snapshots(step, token=f"t{step}"):
            writer.save(snapshot)
    writer.wait()
    watching = False
    pruned = str(tmp_path / ".step-00000001.pruned-t2")
    changes = [change for change in touched if change[0] != "open"]
    assert changes == [
        (
            "os.rename",
            str(tmp_path / f".step-0000000{step}.partial-t{step}"),
            str(tmp_path / f"step-0000000{step}"),
        )
        for step in (1, 2)
    ] + [("os.rename", str(tmp_path / "step-00000001"), pruned)]
    assert all(mode == "r" or mode == "rb" for event, _, mode in touched if event == "open"), touched


def test_cancel_ends_a_save_that_waits_for_a_dead_member(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(snapshots(2, num_members=2)[0])
    writer.cancel()
    writer.wait()
    assert names(tmp_path) == []
    writer.save(snapshots(3)[0])
    writer.wait()
    assert steps(tmp_path) == [3]


def test_parts_that_do_not_make_a_whole_are_not_committed(tmp_path: Path) -> None:
    one, other = snapshots(2, num_members=2)
    writer = CheckpointWriter(tmp_path)
    lonely = Snapshot(2, "t", "m1", ("m1",), True, one.slices)
    writer.save(lonely)
    with pytest.raises(CheckpointError, match=r"of model/weight, 20 of its 35 elements are in no part"):
        writer.wait()
    writer.save(Snapshot(2, "t", "m1", ("m1",), True, (*one.slices, *other.slices, other.slices[0])))
    with pytest.raises(CheckpointError, match=r"model/weight \[3:7, 0:5\] is in the snapshot twice"):
        writer.wait()
    overlap = Slice(one.slices[0].spec, Box((2, 0), (7, 5)), torch.zeros(5, 5), owner=True)
    writer.save(Snapshot(2, "t", "m1", ("m1",), True, (one.slices[0], overlap)))
    with pytest.raises(CheckpointError, match=r"of model/weight, the parts \[0:3, .* and \[2:7, .* overlap"):
        writer.wait()
    assert names(tmp_path) == []


def test_meta_that_is_not_json_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be JSON"):
        CheckpointWriter(tmp_path).save(snapshots(1, loss=torch.zeros(1))[0])


@pytest.mark.parametrize("word", ["../m1", "a/b", "", ".hidden", "m 1"])
def test_member_ids_and_tokens_stay_inside_the_folder(word: str) -> None:
    with pytest.raises(ValueError, match="is made of letters"):
        Snapshot(1, "t", word, (word,), True, ())
    with pytest.raises(ValueError, match="is made of letters"):
        Snapshot(1, word, "m1", ("m1",), True, ())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_leaves_the_newest(tmp_path: Path, keep: int) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=keep)
    assert steps(tmp_path) == [40, 30, 20, 10][:keep]
    assert len(names(tmp_path)) == keep


def test_the_newest_are_those_of_the_highest_numbers_rs11(tmp_path: Path) -> None:
    """Numbers, not names: of nine digits the first comes before one of eight in a list of names."""
    for step in (900, 1000, 1100, 99_999_999, 100_000_000):
        save(tmp_path, step, keep=2)
        if step == 1100:
            assert steps(tmp_path) == [1100, 1000]
    assert steps(tmp_path) == [100_000_000, 99_999_999]
    assert newest_whole(tmp_path)[0].step == 100_000_000


def test_one_member_deletes_for_all_rs13(tmp_path: Path) -> None:
    for step in range(1, 11):
        save(tmp_path, step, num_members=4, keep=1)
        assert names(tmp_path) == [f"step-{step:08d}"]


@pytest.mark.parametrize(
    ("keep", "pinned", "left"),
    [(1, 10, [40, 10]), (2, 20, [40, 30, 20]), (2, 30, [40, 30]), (1, 40, [40]), (2, None, [40, 30])],
)
def test_a_pinned_one_stays_besides_the_newest(tmp_path: Path, keep: int, pinned: int | None, left: list[int]) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    writer = CheckpointWriter(tmp_path, keep)
    writer.save(replace(snapshots(40)[0], pinned=pinned))
    writer.wait()
    assert steps(tmp_path) == left


def test_keep_does_not_count_damaged_ones_and_spares_newer_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 50):
        save(tmp_path, step)
    os.truncate(tmp_path / "step-00000030" / "member-m1.safetensors", 50)
    save(tmp_path, 40, keep=2)
    assert names(tmp_path) == [f"step-000000{step}" for step in (20, 30, 40, 50)]


@pytest.mark.parametrize("point", [*MEMBER_POINTS, *COMMITTER_POINTS[:4]])
def test_keep_1_keeps_the_last_good_one_when_the_new_save_fails(tmp_path: Path, point: str) -> None:
    save(tmp_path, 1, keep=1)

    def fail(passed: str) -> None:
        if passed == point:
            raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path, keep=1, on_point=fail)
    writer.save(snapshots(2)[0])
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint step-00000002 .*: No space left on device"):
        writer.wait()
    assert names(tmp_path) == ["step-00000001"]
    newest_whole(tmp_path)


def test_saving_a_step_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    os.truncate(path / "member-m1.safetensors", 50)
    writer = CheckpointWriter(tmp_path)
    writer.save(snapshots(1, token="again")[0])
    writer.wait()
    assert names(tmp_path) == ["step-00000001"]
    open_checkpoint(path).verify()


def test_an_old_one_moved_aside_counts_until_its_place_is_taken(tmp_path: Path) -> None:
    """A save of the same step died between its two renames."""
    save(tmp_path, 1).rename(tmp_path / ".step-00000001.replaced-dead")
    assert newest_whole(tmp_path)[0].step == 1
    assert sweep(tmp_path) == []
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_commit_sweeps_what_dead_saves_left_but_no_later_save(tmp_path: Path) -> None:
    """Another member may already be writing the next save while this one is still being committed."""
    for name in (".step-00000003.partial-dead", ".step-00000005.pruned-x", ".step-00000009.partial-live"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").mkdir()
    save(tmp_path, 7)
    assert names(tmp_path) == [".step-00000009.partial-live", "notes", "step-00000007"]
    assert sweep(tmp_path) == [".step-00000009.partial-live"]
    assert names(tmp_path) == ["notes", "step-00000007"]


def test_nothing_to_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointWriter(tmp_path, keep=0)
