"""One device's steps, read back slice by slice: a rank reads only what it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stretto.state import Box
from stretto.verify.facts import ReferenceRecord
from stretto.verify.reference import RECORD


class Recorded:
    """The files that a :class:`~stretto.verify.reference.Reference` left in ``folder``.

    Args:
        cut_inside: see :class:`~stretto.verify.facts.ReferenceRecord`.
    """

    def __init__(self, folder: Path, cut_inside: bool = False) -> None:
        self._folder = folder
        record = ReferenceRecord.from_json(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        self.record = replace(record, cut_inside=cut_inside)
        self._files: dict[int, Any] = {}

    def names(self, step: int) -> frozenset[str]:
        """The tensors of one step."""
        return frozenset(self._file(step).keys())

    def shape(self, step: int, name: str) -> tuple[int, ...]:
        """Logical shape. The tensor must be one of :meth:`names`."""
        shape = tuple(self._file(step).get_slice(name).get_shape())
        return shape[:-1] if self._is_complex(step, name) else shape

    def read(self, step: int, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, shape ``box.shape``; nothing else of it is read."""
        if not box.starts or not box.numel:
            return self._true(step, name, self._file(step).get_tensor(name)).reshape(-1)[: box.numel].view(box.shape)
        bounds = box.within(Box.whole(self.shape(step, name)))
        # The library wants each dimension named, the last one of a complex tensor too.
        pair = (slice(0, 2),) if self._is_complex(step, name) else ()
        return self._true(step, name, self._file(step).get_slice(name)[(*bounds, *pair)])

    def _is_complex(self, step: int, name: str) -> bool:
        return name in (self._file(step).metadata() or {})

    def _true(self, step: int, name: str, stored: torch.Tensor) -> torch.Tensor:
        """A complex tensor is stored with a last axis of two; torch wants its memory better aligned than a file is."""
        return torch.view_as_complex(stored.clone()) if self._is_complex(step, name) else stored

    def scale(self, step: int, measure: str) -> float:
        """Largest magnitude on one device; 0 for a measure that nothing has."""
        record = self.record
        scales = record.scales if step == 0 else record.steps[step - 1].scales
        return scales.get(measure, 0.0)

    def _file(self, step: int) -> Any:
        if step not in self._files:
            self._files.clear()  # steps are looked at in order; an old one's pages need not stay mapped
            self._files[step] = safe_open(str(self._folder / f"step-{step}.safetensors"), framework="pt")
        return self._files[step]
