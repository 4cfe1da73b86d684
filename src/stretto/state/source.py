"""Where any box of any logical tensor can be read: memory, the slices of several members, a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from stretto.errors import nearest
from stretto.state.dtypes import torch_dtype
from stretto.state.logical import Box, Slice, TensorSpec, first_overlap

if TYPE_CHECKING:
    import torch


class StateSource(Protocol):
    """A state that can be read under any cut, whatever cut it was written under."""

    def names(self) -> Collection[str]:
        """The names of all logical tensors."""

    def spec(self, name: str) -> TensorSpec:
        """Shape and element type of one tensor; an unknown name raises KeyError."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of one box, of shape ``box.shape``, on the CPU, in memory that the caller may keep."""


class MemorySource:
    """A state of whole tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Collection[str]:
        """The names, in the order given."""
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Shape and element type; KeyError for an unknown name."""
        return TensorSpec.of(name, self._find(name))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A copy of one box."""
        tensor = self._find(name)
        return private_copy(tensor[box.within(Box.whole(tensor.shape))])

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise KeyError(f"the state has no tensor {name!r}{nearest(name, self._tensors)}")
        return self._tensors[name]


class SliceSource:
    """A state made of slices, those of one member or of several; replicas may overlap."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._slices: dict[str, list[Slice]] = {}
        for piece in slices:
            known = self._slices.setdefault(piece.spec.name, [])
            if known and known[0].spec != piece.spec:
                raise ValueError(f"two slices disagree on one tensor: {known[0].spec} and {piece.spec}")
            known.append(piece)

    def names(self) -> Collection[str]:
        """The names that have at least one slice."""
        return self._slices.keys()

    def spec(self, name: str) -> TensorSpec:
        """Shape and element type; KeyError for an unknown name."""
        return self._find(name)[0].spec

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A copy of one box, put together from the slices that meet it.

        Raises:
            ValueError: some of its elements are in no slice.
        """
        pieces = self._find(name)
        return assemble(pieces[0].spec, box, ((piece.box, piece.data) for piece in pieces))

    def _find(self, name: str) -> list[Slice]:
        if name not in self._slices:
            raise KeyError(f"the state has no tensor {name!r}{nearest(name, self._slices)}")
        return self._slices[name]


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values in contiguous memory on the CPU that nothing else points to."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def assemble(spec: TensorSpec, box: Box, parts: Iterable[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """One box out of parts that may lie anywhere in the tensor; where parts overlap the later one stands.

    Raises:
        ValueError: the box is not inside the tensor, or some of its elements are in no part.
    """
    import torch

    if not box.inside(Box.whole(spec.shape)):
        raise ValueError(f"{spec.name}: the box {box} is not inside shape {spec.shape}")
    result = torch.empty(box.shape, dtype=torch_dtype(spec.dtype))
    met: list[Box] = []
    for part_box, data in parts:
        common = box.intersect(part_box)
        if common is not None:
            result[common.within(box)] = data.detach()[common.within(part_box)]
            met.append(common)
    if sum(part.numel for part in met) == box.numel and first_overlap(met) is None:
        return result
    # Where replicas overlap, the number of copied elements proves nothing: count the places instead.
    seen = torch.zeros(box.shape, dtype=torch.bool)
    for part in met:
        seen[part.within(box)] = True
    missing = box.numel - int(seen.sum())
    if missing:
        raise ValueError(f"{spec.name}: {missing} of the {box.numel} elements of {box} are in no slice")
    return result
