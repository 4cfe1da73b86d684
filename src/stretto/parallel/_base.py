"""The contract of a layout.

``apply(template, plan, group)`` gives an :class:`Applied`: a module that is called like the user's own and that knows,
for every logical tensor, which part lies here. First build, resume and recovery are the same two calls, ``apply`` and
``import_state``, over another source. The user's module is never touched: layouts are built on copies of the template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from stretto.state import Box, Slice, StateSource, TensorSpec


@dataclass(frozen=True)
class Place:
    """Where one logical parameter lies on this rank.

    Args:
        spec: name, logical shape and type; ``spec.name`` is the parameter's name in the model.
        box: the part of it that lies here.
        local: a plain parameter over that part, of shape ``box.shape``; what an optimizer updates.
        owner: this rank answers for the part in checkpoints and digests.
        lead: this rank answers for what belongs to the whole parameter, such as its step counter.
        summed: the layout itself adds its gradient over every rank; otherwise the sync rule has to.
    """

    spec: TensorSpec
    box: Box
    local: nn.Parameter
    owner: bool
    lead: bool
    summed: bool


class Applied(Protocol):
    """A template laid out over a group. Every rank of the group must make the same calls in the same order."""

    module: nn.Module

    @property
    def places(self) -> Mapping[str, Place]:
        """Every parameter by name, in the model's order; the same names on every rank."""

    @property
    def communicates(self) -> bool:
        """Whether forward or backward enter collectives of the layout's own."""

    def microbatch(self, last: bool, ghost: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one microbatch; on the ``last`` one gradients are reduced."""

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of this rank's part of a parameter, shape ``box.shape``; None where nothing reached it."""

    @property
    def mark(self) -> int:
        """A number below 2**20 that stands for the order in which units were gathered since the last clearing. Ranks
        that gather different units of one size together would compute with each other's layers."""

    def reached(self, name: str) -> bool:
        """Whether a real sample's gradient has reached a ``summed`` parameter on this rank since the last clearing."""

    def clear_gradients(self) -> None:
        """Forgets all gradients that the layout itself holds."""

    def export_state(self) -> Iterator[Slice]:
        """This rank's part of every parameter and buffer, as views, named ``model/...``."""

    def import_state(self, source: StateSource) -> None:
        """Fills every parameter and buffer from ``source``, reading only this rank's parts."""

    def teardown(self) -> None:
        """Lets go of the group and of all tensors; the object is not used again."""
