"""Finding, checking and reading checkpoints, under any cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from stretto.checkpoint.manifest import FileEntry, Manifest, PieceEntry, parse_manifest
from stretto.checkpoint.names import MANIFEST, list_checkpoints, list_hidden, step_name, step_of
from stretto.checkpoint.tensorfile import TensorFile, read_header_digest
from stretto.errors import CheckpointError, nearest, one_line
from stretto.state import Box, TensorSpec, tiling_fault
from stretto.state.digest import combine, format_digest, partial_digest
from stretto.state.source import assemble

T = TypeVar("T")


class Checkpoint:
    """A committed checkpoint whose manifest and file sizes are in order; a :class:`StateSource`.

    Made by :func:`open_checkpoint`. Tensors are read when asked for, and only the files that hold a part of
    them.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        self._file = functools.cache(lambda name: TensorFile(path / name))

    @property
    def step(self) -> int:
        """The number of committed steps in this state."""
        return self._manifest.step

    @property
    def members(self) -> tuple[str, ...]:
        """The members that wrote it."""
        return self._manifest.members

    @property
    def meta(self) -> dict[str, Any]:
        """The JSON that was saved beside the tensors."""
        return self._manifest.meta

    def names(self) -> Collection[str]:
        """The names of all logical tensors."""
        return self._manifest.tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Shape and element type; KeyError for an unknown name."""
        tensors = self._manifest.tensors
        if name not in tensors:
            raise KeyError(f"checkpoint {self.path.name} has no tensor {name!r}{nearest(name, tensors)}")
        return tensors[name].spec(name)

    def digest(self, name: str) -> str:
        """The digest of one logical tensor, as written in the manifest."""
        self.spec(name)
        return self._manifest.tensors[name].digest

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of one box, in fresh memory.

        Raises:
            CheckpointError: a file cannot be read.
        """
        spec = self.spec(name)

        def parts() -> Iterator[tuple[Box, torch.Tensor]]:
            for piece in self._manifest.tensors[name].pieces:
                common = piece.box().intersect(box)
                if common is not None:
                    yield common, self._piece(name, piece, common)

        return assemble(spec, box, parts())

    def verify(self) -> None:
        """Reads everything and compares it with the digests.

        Raises:
            CheckpointError: naming the file and the tensor that differ.
        """
        for name, tensor in self._manifest.tensors.items():
            for piece in tensor.pieces:
                data = self._piece(name, piece, None)
                if partial_digest(data, piece.box(), tensor.shape) != int(piece.partial, 16):
                    raise _damaged(self.path, f"{piece.file}: the data of {name} {piece.box()} was altered")

    def _piece(self, name: str, piece: PieceEntry, part: Box | None) -> torch.Tensor:
        """``part`` of one piece, or all of it; not to be kept."""
        spec = self.spec(name)

        def read() -> torch.Tensor:
            file = self._file(piece.file)
            if part is None:
                return file.view(piece.key, spec)
            return file.read(piece.key, spec, part.within(piece.box()))

        data = _reading(self.path, f"{piece.file}: {name}", read)
        if part is None and tuple(data.shape) != piece.box().shape:
            fault = f"{name} has shape {tuple(data.shape)}, not that of {piece.box()}"
            raise _damaged(self.path, f"{piece.file}: {fault}")
        return data


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint folder after all checks that do not read the tensors.

    Raises:
        CheckpointError: no manifest, an altered one, a file missing or of the wrong size, pieces that do
        not make
            whole tensors. One line that names the file.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}")
    if not file.exists():
        raise _damaged(path, f"{MANIFEST} is missing")
    text = _reading(path, MANIFEST, lambda: file.read_bytes().decode())
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST} {error}") from None
    if step_of(path) not in (None, manifest.step):
        raise _damaged(path, f"{MANIFEST} is of step {manifest.step}")
    for name, entry in manifest.files.items():
        _check_file(path, name, entry)
    for name, tensor in manifest.tensors.items():
        fault = tiling_fault(tensor.shape, [piece.box() for piece in tensor.pieces])
        total = combine(int(piece.partial, 16) for piece in tensor.pieces)
        if fault is None and format_digest(tensor.spec(name), total) != tensor.digest:
            fault = "the digests of its parts do not make its own"
        if fault is not None:
            raise _damaged(path, f"{MANIFEST}: {name}: {fault}")
    return Checkpoint(path, manifest)


def newest_whole(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint in ``RUN/checkpoints`` that is whole to the last byte, and notes for the user.

    Every newer one that is damaged or was never finished is named in a note, with the reason.

    Raises:
        CheckpointError: there is none.
    """
    reasons: list[str] = []
    for path in list_checkpoints(folder):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify()
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        reasons = _unfinished(folder, checkpoint.step) + reasons
        return checkpoint, [f"{reason}; using {step_name(checkpoint.step)}" for reason in reasons]
    reasons = _unfinished(folder, -1) + reasons
    if reasons:
        listed = "; ".join(reasons)
        raise CheckpointError(f"no whole checkpoint in {folder}: {listed}; the run must start anew")
    raise CheckpointError(f"no checkpoint in {folder}; the run must start anew")


def _unfinished(folder: Path, step: int) -> list[str]:
    return [
        f"checkpoint {step_name(hidden.step)} was never finished ({hidden.path.name})"
        for hidden in reversed(list_hidden(folder))
        if hidden.kind == "partial" and hidden.step > step
    ]


def _check_file(path: Path, name: str, entry: FileEntry) -> None:
    file = path / name
    # A link could lead out of the folder, and would not have been flushed with it.
    if file.is_symlink() or not file.is_file():
        raise _damaged(path, f"{name} is {'not a plain file' if file.is_symlink() else 'missing'}")
    excess = file.stat().st_size - entry.num_bytes
    if excess:
        raise _damaged(path, f"{name} is {abs(excess)} bytes {'short' if excess < 0 else 'too long'}")
    if _reading(path, name, lambda: read_header_digest(file)) != entry.header:
        raise _damaged(path, f"{name}: its header was altered")


def _reading(path: Path, what: str, read: Callable[[], T]) -> T:
    """Whatever goes wrong while a file is read, as one line about the checkpoint."""
    try:
        return read()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {what}: {error.strerror}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise _damaged(path, f"{what}: {one_line(error)}") from error


def _damaged(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path.name} is damaged: {fault}")
