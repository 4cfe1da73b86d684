"""zero=0, 1, 2: every rank holds the whole model; gradients are left to the sync rule.

With zero=1 and 2 each rank updates its share of the parameters, so that the optimizer's state is cut over the ranks
(ZeRO, arXiv 1910.02054, sections 5.1 and 5.2; what stage 2 adds is how the sync rule keeps gradients). The other shares
come from their owners before the next forward, not in the update: an update sends nothing, so none can half happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

from stretto.parallel._base import Manner, Place, Ranks
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.copies import copy_down, dealt_place, lay_flat, narrowed, sparse_parameters, whole_place
from stretto.parallel.layout import buffer_slices, check_frozen, export_places, import_buffers, import_places
from stretto.parallel.template import Template
from stretto.state import Bucket, Shares, Slice, StateSource, assign_owners, deal, pack

GATHER_BYTES: Final = 32 * 2**20


class Whole:
    """A replica of the template on each rank.

    Args:
        dealt: each rank updates a share of the parameters, not all of them.
    """

    def __init__(self, template: Template, ranks: Ranks, manner: Manner, dealt: bool) -> None:
        self.ranks = ranks
        self.module = template.build(ranks.world.device, narrowed(template, manner.compute))
        self._norm = GlobalBatchNorm(self.module, ranks.world)
        self._sparse = sparse_parameters(self.module)
        shares: dict[str, Shares] = {}
        if dealt:
            cuttable = [s for n, s in template.specs.items() if template.trainable[n] and n not in self._sparse]
            shares = deal(cuttable, ranks.world.size, manner.whole_tensors)
        self._flats = self._lay_flat(template, shares)
        self._places = self._settle(template, shares)
        self._frozen = {name: p.compute for name, p in self._places.items() if not template.trainable[name]}
        self._stale = True

    def _lay_flat(self, template: Template, shares: Mapping[str, Shares]) -> list[tuple[Bucket, torch.Tensor]]:
        """Moves the dealt parameters into flat memory, so that one call brings many of them, without a copy."""
        parameters = dict(self.module.named_parameters())
        found = []
        for bucket in pack((template.specs[name] for name in template.specs if name in shares), shares, GATHER_BYTES):
            inside = {name: parameters[name] for name in bucket.names}
            found.append((bucket, lay_flat(inside, bucket.offsets, bucket.numel)))
        return found

    def _settle(self, template: Template, shares: Mapping[str, Shares]) -> dict[str, Place]:
        world = self.ranks.world
        owners = assign_owners((spec for name, spec in template.specs.items() if name not in shares), world.size)
        found: dict[str, Place] = {}
        for name, parameter in self.module.named_parameters():
            spec = template.specs[name]
            if name in shares:
                found[name] = dealt_place(spec, parameter, shares[name], world.rank)
            else:
                found[name] = whole_place(spec, parameter, owners[name] == world.rank, name in self._sparse)
        return found

    @property
    def places(self) -> Mapping[str, Place]:
        """See :class:`Applied`."""
        return self._places

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`; only a BatchNorm does."""
        return self._norm.active

    def refresh(self) -> None:
        """See :class:`Applied`; a collective where parameters are dealt."""
        if not self._stale:
            return
        copy_down(self._places.values())
        for bucket, flat in self._flats:
            assert bucket.sizes is not None
            self.ranks.world.gather_parts(flat, bucket.sizes)
        self._stale = False

    def updated(self) -> None:
        """See :class:`Applied`."""
        self._stale = True

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; nothing is reduced here."""
        with self._norm.counting(not ghost):
            yield
        check_frozen(self._frozen)

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
        yield from buffer_slices(self.module, self.ranks.world)

    def import_state(self, source: StateSource) -> None:
        """See :class:`Applied`."""
        import_places(self._places, source)
        import_buffers(self.module, source)
        self._stale = True

    def teardown(self) -> None:
        """See :class:`Applied`."""
        self._norm.remove()
        self._places, self._frozen = {}, {}
        self._flats = []
        del self.module
