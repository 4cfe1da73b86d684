"""zero=0: every rank holds the whole model; gradients are left to the sync rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from stretto.comm.group import Group
from stretto.parallel._base import Place
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.layout import buffer_slices, export_places, import_buffers, import_places
from stretto.parallel.template import Template
from stretto.state import Box, Slice, StateSource, TensorSpec, assign_owners


def _place(spec: TensorSpec, parameter: nn.Parameter, owner: bool) -> Place:
    return Place(spec, Box.whole(spec.shape), parameter, owner=owner, lead=owner, summed=False)


class Whole:
    """A replica of the template on each rank of ``group``."""

    def __init__(self, template: Template, group: Group) -> None:
        self.module = template.build(group.device)
        self._group = group
        self._norm = GlobalBatchNorm(self.module, group)
        owners = assign_owners(template.specs.values(), group.size)
        self._places = {
            name: _place(spec, parameter, owners[name] == group.rank)
            for (name, parameter), spec in zip(self.module.named_parameters(), template.specs.values(), strict=True)
        }

    @property
    def places(self) -> Mapping[str, Place]:
        """See :class:`Applied`."""
        return self._places

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`; only a BatchNorm does."""
        return self._norm.active

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; nothing is reduced here."""
        with self._norm.counting(not ghost):
            yield

    def gradient(self, name: str) -> torch.Tensor | None:
        """See :class:`Applied`."""
        return self._places[name].local.grad

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
        yield from buffer_slices(self.module, self._group)

    def import_state(self, source: StateSource) -> None:
        """See :class:`Applied`."""
        import_places(self._places, source)
        import_buffers(self.module, source)

    def teardown(self) -> None:
        """See :class:`Applied`."""
        self._norm.remove()
        self._places = {}
        del self.module
