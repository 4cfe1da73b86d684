"""Damage of every kind is named, and the newest whole checkpoint is used."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from state_cuts import bits, save, state_of_step
from stretto.checkpoint import Checkpoint, newest_whole, open_checkpoint
from stretto.checkpoint.manifest import _checksum, _text
from stretto.errors import CheckpointError
from stretto.state import Box

OTHER = "member-m2.safetensors"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def truncate(path: Path) -> None:
    os.truncate(path / OTHER, (path / OTHER).stat().st_size - 12)


def lengthen(path: Path) -> None:
    with (path / OTHER).open("ab") as file:
        file.write(b"x")


def link_outside(path: Path) -> None:
    (path / OTHER).rename(path.parent / "elsewhere")
    (path / OTHER).symlink_to(path.parent / "elsewhere")


def rewrite_manifest(path: Path, alter: Callable[[dict[str, object]], None]) -> None:
    """A manifest that is well-formed to the checksum: by another program, not by damage."""
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"]
    alter(content)
    (path / "manifest.json").write_text(_text({**content, "checksum": _checksum(content)}))


def name_a_file_outside(path: Path) -> None:
    shutil.copy(path / OTHER, path.parent / "member-m2.safetensors")

    def alter(content: dict[str, object]) -> None:
        text = json.dumps(content).replace(OTHER, "../member-m2.safetensors")
        content.clear()
        content.update(json.loads(text))

    rewrite_manifest(path, alter)


def claim(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: rewrite_manifest(path, lambda content: content.update({key: value}))


def forget_a_piece(path: Path) -> None:
    def alter(content: dict[str, object]) -> None:
        content["tensors"]["model/weight"]["pieces"].pop()  # type: ignore[index]

    rewrite_manifest(path, alter)


def swap_a_line_break_for_a_space(path: Path) -> None:
    """Alters no value."""
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("\n", " ", 1))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, f"{OTHER} is 12 bytes short"),
    "lengthened": (lengthen, f"{OTHER} is 1 bytes too long"),
    "missing": (lambda path: (path / OTHER).unlink(), f"{OTHER} is missing"),
    "linked": (link_outside, f"{OTHER} is not a plain file"),
    "data": (
        lambda path: flip(path / OTHER, -1),
        f"{OTHER}: the data of generator/torch [32:64] was altered",
    ),
    "header": (lambda path: flip(path / OTHER, 20), f"{OTHER}: its header was altered"),
    "header length": (lambda path: flip(path / OTHER, 6), f"{OTHER}: its header was altered"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is not JSON"),
    "half manifest": (lambda path: os.truncate(path / "manifest.json", 900), "manifest.json is not JSON"),
    "not a manifest": (
        lambda path: (path / "manifest.json").write_text("{}"),
        "is not a checkpoint's manifest",
    ),
    "outside": (name_a_file_outside, "'../member-m2.safetensors' is not a data file of this folder"),
    "spaces": (swap_a_line_break_for_a_space, "manifest.json was altered (its checksum does not match)"),
    "version": (claim("version", 2), "manifest.json has version 2; this program reads version 1"),
    "step": (claim("step", 99), "manifest.json is of step 99"),
    "unknown field": (
        claim("extra", 1),
        "manifest.json is not valid at extra: Extra inputs are not permitted",
    ),
    "piece": (forget_a_piece, "model/weight: 20 of its 35 elements are in no part"),
}


def check_step(checkpoint: Checkpoint, step: int) -> None:
    for name, tensor in state_of_step(step).items():
        assert bits(checkpoint.read(name, Box.whole(tensor.shape))) == bits(tensor)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_newest_whole_one_is_used(tmp_path: Path, kind: str) -> None:
    damage, fault = DAMAGE[kind]
    save(tmp_path, 25, num_members=2)
    save(tmp_path, 50, num_members=2)
    damage(save(tmp_path, 100, num_members=2))
    checkpoint, notes = newest_whole(tmp_path)
    assert checkpoint.step == 50
    check_step(checkpoint, 50)
    (note,) = notes
    assert note.startswith("checkpoint step-00000100 is damaged: ")
    assert fault in note
    assert note.endswith("; using step-00000050")
    assert "\n" not in note


def test_every_single_byte_is_guarded(tmp_path: Path) -> None:
    """One bit of each of 400 bytes, over all files, one at a time."""
    path = save(tmp_path, 100, num_members=2)
    draw = random.Random(1)
    places = [(file, offset) for file in sorted(path.iterdir()) for offset in range(file.stat().st_size)]
    for file, offset in draw.sample(places, 400):
        whole = file.read_bytes()
        flip(file, offset, draw.randrange(8))
        with pytest.raises(CheckpointError, match="is damaged"):
            open_checkpoint(path).verify()
        file.write_bytes(whole)
    open_checkpoint(path).verify()


def test_an_altered_number_in_meta_is_seen(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1, seed=12345) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("12345", "12346"))
    with pytest.raises(CheckpointError, match="was altered"):
        open_checkpoint(manifest.parent)


def test_an_unfinished_save_is_named_when_it_is_newer(tmp_path: Path) -> None:
    save(tmp_path, 50)
    unfinished = tmp_path / ".step-00000100.partial-a1"
    shutil.copytree(save(tmp_path, 100), unfinished)
    shutil.rmtree(tmp_path / "step-00000100")
    (tmp_path / ".step-00000040.partial-a0").mkdir()
    checkpoint, notes = newest_whole(tmp_path)
    assert checkpoint.step == 50
    assert notes == ["checkpoint step-00000100 was never finished (.step-00000100.partial-a1); using step-00000050"]


def test_a_whole_newest_one_needs_no_note(tmp_path: Path) -> None:
    save(tmp_path, 50)
    save(tmp_path, 100)
    checkpoint, notes = newest_whole(tmp_path)
    assert (checkpoint.step, notes) == (100, [])


def test_when_none_is_whole_one_line_names_them_all(tmp_path: Path) -> None:
    truncate(save(tmp_path, 50, num_members=2))
    (save(tmp_path, 100, num_members=2) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_whole(tmp_path)
    line = str(caught.value)
    assert "step-00000100 is damaged: manifest.json is missing; checkpoint step-00000050 is damaged" in line
    assert line.startswith("no whole checkpoint in ")
    assert "\n" not in line


@pytest.mark.parametrize("folder", [".", "not-there"])
def test_no_checkpoint_at_all_is_one_line(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"^no checkpoint in .*; the run must start anew$"):
        newest_whole(tmp_path / folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        open_checkpoint(tmp_path / "step-00000001")
