"""What layouts share: reading and writing the logical state of a module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.errors import TaskError
from stretto.parallel._base import Around, Manner, Microbatch, Place, Ranks
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.copies import copy_down
from stretto.parallel.offload import Offloaded
from stretto.parallel.recompute import Recomputed
from stretto.schedule import Schedule
from stretto.state import Box, Part, Slice, StateSource, TensorSpec, assign_owners

CutBuffers = Mapping[str, tuple[TensorSpec, Part]]
"""Of buffers that ``tp`` cuts, by name: what the whole is, and what of it lies here."""
NONE_CUT: Final[CutBuffers] = MappingProxyType({})


class Placed:
    """What every layout does with its places; see :class:`Applied`.

    Args:
        by_modules: layers are computed again where they stand in the module; otherwise the layout sees to it.

    ``_stale``: the parameters have changed since forward last used them.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, manner: Manner, by_modules: bool = True) -> None:
        self.module, self.ranks = module, ranks
        self._norm = GlobalBatchNorm(module, ranks.world)
        self._recomputed = Recomputed(module, manner if by_modules else replace(manner, recompute="none"), self._norm)
        self._offloaded = Offloaded(module, manner, ranks.world.device)
        self.notes = (*self._recomputed.notes, *self._offloaded.notes)
        self._places: dict[str, Place] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._cut_buffers = NONE_CUT
        self._stale = True
        self.schedule: Schedule | None = None

    @property
    def places(self) -> Mapping[str, Place]:
        """See :class:`Applied`."""
        return self._places

    def refresh(self) -> None:
        """See :class:`Applied`."""
        if self._stale:
            copy_down(self._places.values())
            self._bring()
            self._offloaded.refreshed()
            self._stale = False

    def _bring(self) -> None:
        """What :meth:`refresh` has to fetch from other ranks: mostly nothing."""

    def updated(self) -> None:
        """See :class:`Applied`."""
        self._stale = True

    def train(self, microbatches: Sequence[Microbatch], around: Around) -> None:
        """See :class:`Applied`; one after the other."""
        for place, each in enumerate(microbatches):
            each.call()  # out here: errors of the user's data are no lost peer's
            with around(last=place == len(microbatches) - 1, ghost=each.ghost):
                with each.span("forward"), self._offloaded.saving():
                    roots = each.loss(each.forward(self.module))
                with each.span("backward"):
                    each.backward(roots)

    def _check(self) -> None:
        """Raises where forward or backward did to a parameter what no update would know of."""
        check_frozen(self._frozen)
        self._offloaded.check()

    # For layouts that leave every gradient to the sync rule, and gather nothing in forward.

    def gradient(self, name: str) -> torch.Tensor | None:
        """See :class:`Applied`."""
        return self._places[name].compute.grad

    @property
    def mark(self) -> int:
        """See :class:`Applied`; nothing is gathered here."""
        return 0

    def reached(self, name: str) -> bool:
        """See :class:`Applied`; no parameter is summed here."""
        return False

    def clear_gradients(self) -> None:
        """See :class:`Applied`; the sync rule holds these gradients."""

    def export_state(self) -> Iterator[Slice]:
        """See :class:`Applied`."""
        yield from export_places(self._places)
        yield from buffer_slices(self.module, self.ranks.everyone)

    def import_state(self, source: StateSource) -> None:
        """See :class:`Applied`."""
        import_places(self._places, source)
        import_buffers(self.module, source, self._cut_buffers)
        self._stale = True

    def teardown(self) -> None:
        """See :class:`Applied`."""
        self._recomputed.remove()
        self._norm.remove()
        self._offloaded.remove()
        self._places, self._frozen = {}, {}
        del self.module


def model_spec(spec: TensorSpec) -> TensorSpec:
    """The spec under its name in a state: ``model/...``."""
    return TensorSpec(f"model/{spec.name}", spec.shape, spec.dtype)


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raises TaskError where one of these requires a gradient by now: on one device it would train from here on."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise TaskError(
                f"task: {name} was frozen when model() returned and requires a gradient now; what trains is fixed "
                "then, so nothing would add its gradient up or apply it. Let it train, in a group of the optimizer "
                "whose lr is 0 until schedule() raises it"
            )


def export_places(places: Mapping[str, Place]) -> Iterator[Slice]:
    """This rank's part of every parameter."""
    for place in places.values():
        for box, where in place.pieces:
            yield Slice(model_spec(place.spec), box, place.local.detach()[where], place.owner)


@torch.no_grad()
def import_places(places: Mapping[str, Place], source: StateSource) -> None:
    """Fills this rank's part of every parameter; the rest of a tensor is not read."""
    for name, place in places.items():
        if place.local.numel():
            for box, where in place.pieces:
                place.local[where].copy_(source.read(f"model/{name}", box))


def buffer_slices(
    module: nn.Module, alike: Members, leave_out: Collection[str] = (), cut: CutBuffers = NONE_CUT
) -> Iterator[Slice]:
    """What lies here of every buffer; it has one owner among those that have the same."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in leave_out}
    parts = {name: cut.get(name) or _whole(name, buffer) for name, buffer in buffers.items()}
    owners = assign_owners((spec for spec, _ in parts.values()), alike.size)
    for name, (spec, part) in parts.items():
        for box, where in part.pieces:
            yield Slice(model_spec(spec), box, buffers[name].detach()[where], owners[name] == alike.rank)


@torch.no_grad()
def import_buffers(module: nn.Module, source: StateSource, cut: CutBuffers = NONE_CUT) -> None:
    """Fills every buffer, also those that a state_dict would leave out."""
    for name, buffer in module.named_buffers():
        _, part = cut.get(name) or _whole(name, buffer)
        for box, where in part.pieces:
            buffer[where].copy_(source.read(f"model/{name}", box))


def _whole(name: str, buffer: torch.Tensor) -> tuple[TensorSpec, Part]:
    spec = TensorSpec.of(name, buffer)
    return spec, Part((Box.whole(spec.shape),))
