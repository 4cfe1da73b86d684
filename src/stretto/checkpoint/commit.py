"""The commit protocol: members write side by side, without collectives; one commits.

1. Each member writes ``member-ID.safetensors`` into ``.step-N.partial-TOKEN``, flushes it to the disk, and
   then, atomically, ``member-ID.json``: what it wrote, with partial digests.
2. The committer waits for the reports of all members, checks that the pieces make whole tensors, writes the
   manifest, flushes the folder, renames it to ``step-N`` and flushes the parent. Before that rename there is
   no checkpoint; after it, it is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.checkpoint.manifest import (
    FileEntry,
    PieceEntry,
    Report,
    TensorEntry,
    dump_manifest,
    dump_report,
    parse_report,
)
from stretto.checkpoint.names import (
    MANIFEST,
    data_name,
    failed_name,
    hidden_name,
    report_name,
    step_name,
)
from stretto.checkpoint.points import OnPoint
from stretto.checkpoint.reader import open_checkpoint
from stretto.checkpoint.snapshot import Snapshot
from stretto.checkpoint.tensorfile import encode, split_half, write_all
from stretto.errors import CheckpointError, one_line
from stretto.state import Slice, TensorSpec, tiling_fault
from stretto.state.digest import combine, format_digest, partial_digest

_POLL_SECONDS = (0.002, 0.05)  # first and longest pause between two looks for reports


class SaveCancelled(Exception):
    """The save was given up on request; nothing is wrong."""


@dataclass(frozen=True)
class Place:
    """Where one save goes, and what watches it."""

    folder: Path
    snapshot: Snapshot
    on_point: OnPoint

    @property
    def partial(self) -> Path:
        """The folder of the unfinished save."""
        return self.folder / hidden_name(self.snapshot.step, "partial", self.snapshot.token)

    @property
    def final(self) -> Path:
        """The folder of the committed checkpoint."""
        return self.folder / step_name(self.snapshot.step)


def write_member(place: Place) -> None:
    """Phase 1: this member's data, then its report. Every member."""
    snapshot, on_point = place.snapshot, place.on_point
    _make_folder(place.folder)
    place.partial.mkdir(exist_ok=True)
    on_point("partial-created")
    pieces = _owned_pieces(snapshot.slices)
    encoded = encode({key: piece.data for key, piece in pieces.items()})
    with _flushed(place.partial / data_name(snapshot.member)) as descriptor:
        on_point("member-file-begin")
        write_all(descriptor, encoded.header)
        first, second = split_half(encoded.arrays)
        for array in first:
            write_all(descriptor, array)
        on_point("member-file-half")
        for array in second:
            write_all(descriptor, array)
        on_point("member-file-written")
    on_point("member-file-fsynced")
    report = Report(
        step=snapshot.step,
        token=snapshot.token,
        member=snapshot.member,
        file=FileEntry(num_bytes=encoded.num_bytes, header=encoded.header_digest),
        tensors=_entries(snapshot.member, pieces),
    )
    path = place.partial / report_name(snapshot.member)
    _write_text(path, dump_report(report), place, "member-report-half")
    on_point("member-report-written")


def commit(place: Place, timeout_seconds: float, cancelled: threading.Event) -> None:
    """Phase 2: waits for all members, then makes the checkpoint. The committer only.

    Raises:
        CheckpointError: a member failed or did not come in time, or the parts do not make a whole.
        SaveCancelled: ``cancelled`` was set while waiting.
    """
    snapshot, on_point = place.snapshot, place.on_point
    reports = _await_reports(place, timeout_seconds, cancelled)
    on_point("members-complete")
    text = dump_manifest(
        step=snapshot.step,
        token=snapshot.token,
        members=snapshot.members,
        files={data_name(report.member): report.file for report in reports},
        tensors=_merge(place, reports),
        meta=snapshot.meta,
    )
    _write_text(place.partial / MANIFEST, text, place, "manifest-half")
    for member in snapshot.members:
        (place.partial / report_name(member)).unlink()
    on_point("manifest-written")
    open_checkpoint(place.partial)
    _flush_folder(place.partial)
    on_point("folder-fsynced")
    if place.final.exists():
        place.final.rename(place.folder / hidden_name(snapshot.step, "replaced", snapshot.token))
        on_point("moved-aside")
    place.partial.rename(place.final)
    on_point("renamed")
    _flush_folder(place.folder)
    on_point("committed")


def abandon(place: Place, reason: str) -> None:
    """After a failure: the committer removes the whole unfinished save, a member its files.

    The member leaves word for the committer, which then need not wait for the timeout. Its data goes first,
    so that a full disk has room for the word.
    """
    if place.snapshot.committer:
        # By a rename, for a member still writing must find the folder there or gone, not half deleted.
        hidden = place.folder / hidden_name(place.snapshot.step, "pruned", place.snapshot.token)
        with contextlib.suppress(OSError):
            place.partial.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        return
    member = place.snapshot.member
    with contextlib.suppress(OSError):
        (place.partial / data_name(member)).unlink(missing_ok=True)
        for name in (report_name(member), report_name(member) + ".tmp"):
            (place.partial / name).unlink(missing_ok=True)
        (place.partial / failed_name(member)).write_text(reason)


def _owned_pieces(slices: tuple[Slice, ...]) -> dict[str, Slice]:
    """The slices to write by key: the tensor's name, and the box where it is not the whole tensor."""
    pieces: dict[str, Slice] = {}
    for piece in slices:
        if not piece.owner or (piece.spec.numel and not piece.box.numel):
            continue
        # A tensor without elements has only name, shape and type to keep: one piece, whatever its box.
        whole = piece.box.shape == piece.spec.shape or not piece.spec.numel
        key = piece.spec.name if whole else f"{piece.spec.name} {piece.box}"
        if key in pieces and piece.spec.numel:
            raise CheckpointError(f"a checkpoint was given up: {key} is in the snapshot twice")
        pieces[key] = piece
    return pieces


def _entries(member: str, pieces: dict[str, Slice]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for key, piece in pieces.items():
        spec = piece.spec
        entry = PieceEntry(
            file=data_name(member),
            key=key,
            starts=piece.box.starts,
            stops=piece.box.stops,
            partial=f"{partial_digest(piece.data, piece.box, spec.shape):016x}",
        )
        before = entries[spec.name].pieces if spec.name in entries else ()
        entries[spec.name] = TensorEntry(dtype=spec.dtype, shape=spec.shape, digest="", pieces=(*before, entry))
    return entries


def _await_reports(place: Place, timeout_seconds: float, cancelled: threading.Event) -> list[Report]:
    snapshot = place.snapshot
    deadline = time.monotonic() + timeout_seconds
    pause, longest = _POLL_SECONDS
    reports: dict[str, Report] = {}
    while True:
        for member in snapshot.members:
            if member not in reports:
                report = _find_report(place, member)
                if report is not None:
                    reports[member] = report
        if len(reports) == len(snapshot.members):
            return [reports[member] for member in snapshot.members]
        if time.monotonic() > deadline:
            missing = ", ".join(member for member in snapshot.members if member not in reports)
            raise CheckpointError(
                f"checkpoint {step_name(snapshot.step)} was given up: member {missing} had not written its "
                f"part after {timeout_seconds:g} s; earlier checkpoints are untouched"
            )
        if cancelled.wait(pause):
            raise SaveCancelled
        pause = min(2 * pause, longest)


def _find_report(place: Place, member: str) -> Report | None:
    path = place.partial / report_name(member)
    failed = place.partial / failed_name(member)
    if failed.exists():
        reason = one_line(failed.read_text()) or "its disk is full"
        raise CheckpointError(
            f"checkpoint {step_name(place.snapshot.step)} in {place.folder} was given up: member {member} could not "
            f"write its part: {reason}; earlier checkpoints are untouched"
        )
    return parse_report(path.read_text()) if path.exists() else None


def _merge(place: Place, reports: list[Report]) -> dict[str, TensorEntry]:
    """The whole tensors out of all members' pieces, each with its digest."""
    name_of_save = step_name(place.snapshot.step)
    specs: dict[str, TensorSpec] = {}
    pieces: dict[str, list[PieceEntry]] = {}
    for report in reports:
        for name, entry in report.tensors.items():
            spec = entry.spec(name)
            if specs.setdefault(name, spec) != spec:
                raise CheckpointError(
                    f"checkpoint {name_of_save} was given up: members disagree on {name}: {specs[name]} and {spec}"
                )
            known = pieces.setdefault(name, [])
            # Of a tensor without elements one piece is enough.
            if spec.numel or not known:
                known.extend(entry.pieces)
    tensors: dict[str, TensorEntry] = {}
    for name, spec in specs.items():
        fault = tiling_fault(spec.shape, [piece.box() for piece in pieces[name]])
        if fault is not None:
            raise CheckpointError(f"checkpoint {name_of_save} was given up: of {name}, {fault}")
        total = combine(int(piece.partial, 16) for piece in pieces[name])
        tensors[name] = TensorEntry(
            dtype=spec.dtype,
            shape=spec.shape,
            digest=format_digest(spec, total),
            pieces=tuple(pieces[name]),
        )
    return tensors


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _flush_folder(folder.parent)


@contextlib.contextmanager
def _flushed(path: Path) -> Iterator[int]:
    """A new file's descriptor; when the block is left without an error, its bytes are on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_text(path: Path, text: str, place: Place, half_point: str) -> None:
    """A small file that appears whole or not at all."""
    data = text.encode()
    temporary = path.with_name(path.name + ".tmp")
    with _flushed(temporary) as descriptor:
        write_all(descriptor, data[: len(data) // 2])
        place.on_point(half_point)
        write_all(descriptor, data[len(data) // 2 :])
    temporary.rename(path)
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    """Puts a folder's own entries on the disk, new names and renames among them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
