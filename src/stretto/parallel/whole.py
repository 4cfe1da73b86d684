"""zero=0, 1, 2, and 3 on one host: every rank sees the whole model; gradients are left to the sync rule.

From zero=1 on each rank updates its share of the parameters, so that the optimizer's state is cut over the ranks
(ZeRO, arXiv 1910.02054, sections 5.1 and 5.2; what stage 2 adds is how the sync rule keeps gradients). The other shares
come from their owners before the next forward, not in the update: an update sends nothing, so none can half happen.

For zero=3 the ranks of one host hold one copy of the weights between them, in memory that all see. So there is nothing
to gather: a rank writes its share where the others read it, and all wait for one another before they do. Nobody reads
while another writes: a rank updates only once every rank's gradients have come, and reads only once every rank has
updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

from stretto.errors import Refused
from stretto.parallel._base import Manner, Place, Ranks
from stretto.parallel.copies import dealt_place, lay_flat, narrowed, sparse_parameters, whole_place
from stretto.parallel.layout import Placed
from stretto.parallel.template import Template
from stretto.state import Bucket, Shares, assign_owners, deal, pack

GATHER_BYTES: Final = 32 * 2**20
_ALIGNED: Final = 64  # bytes


class Whole(Placed):
    """A replica of the template on each rank.

    Args:
        dealt: each rank updates a share of the parameters, not all of them.
        one_copy: the ranks hold the dealt parameters once between them, also those that don't train.

    Raises:
        Unavailable: on every rank alike, where ``one_copy`` is asked of ranks that can't share memory.
    """

    def __init__(self, template: Template, ranks: Ranks, manner: Manner, dealt: bool, one_copy: bool = False) -> None:
        super().__init__(template.build(ranks.world.device, narrowed(template, manner.compute)), ranks, manner)
        self.reduces_once = manner.reduce_once
        self._sparse = sparse_parameters(self.module)
        shares: dict[str, Shares] = {}
        if dealt:
            dense = [spec for name, spec in template.specs.items() if name not in self._sparse]
            # A frozen one that each rank holds needs no gathering, so it is not dealt.
            cuttable = [spec for spec in dense if one_copy or template.trainable[spec.name]]
            shares = deal(cuttable, ranks.world.size, manner.whole_tensors)
        self._one_copy = one_copy
        self._flats = self._lay_flat(template, shares)
        self._places = self._offloaded.places(self._settle(template, shares))
        self._dealt_at = {name: self._places[name].compute.data_ptr() for name in shares}
        self._frozen = {name: p.compute for name, p in self._places.items() if not template.trainable[name]}

    def _lay_flat(self, template: Template, shares: Mapping[str, Shares]) -> list[tuple[Bucket, torch.Tensor]]:
        """Moves the dealt parameters into flat memory, so that one call brings many of them, without a copy."""
        parameters = dict(self.module.named_parameters())
        dealt = [spec for name, spec in template.specs.items() if name in shares]
        buckets = pack(dealt, shares, GATHER_BYTES)
        types = [parameters[bucket.names[0]].dtype for bucket in buckets]
        flats = self._memory([(bucket.numel, dtype) for bucket, dtype in zip(buckets, types, strict=True)])
        for bucket, flat in zip(buckets, flats, strict=True):
            lay_flat({name: parameters[name] for name in bucket.names}, bucket.offsets, flat)
        return list(zip(buckets, flats, strict=True))

    def _memory(self, wanted: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """New flat tensors of so many elements of a type."""
        world = self.ranks.world
        if not self._one_copy:
            return [torch.empty(numel, dtype=dtype, device=world.device) for numel, dtype in wanted]
        rooms = [-(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED for numel, dtype in wanted]
        cells = torch.split(world.shared_memory(sum(rooms)), rooms)
        return [room[: numel * dtype.itemsize].view(dtype) for room, (numel, dtype) in zip(cells, wanted, strict=True)]

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
    def communicates(self) -> bool:
        """See :class:`Applied`; only a BatchNorm does."""
        return self._norm.active

    def _bring(self) -> None:
        """The other shares, from their owners; of one copy, that their owners have written them."""
        if self._one_copy:
            self.ranks.world.barrier()
            return
        for bucket, flat in self._flats:
            assert bucket.sizes is not None
            self.ranks.world.gather_parts(flat, bucket.sizes)

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; nothing is reduced here."""
        with self._norm.counting(not ghost):
            yield
        self._check()
        for name, address in self._dealt_at.items():
            if self._places[name].compute.data_ptr() != address:
                raise Refused(
                    f"plan: forward gives the parameter {name} other memory (it says {name}.data = ...), where updates "
                    "don't reach it; compute from the parameter what forward needs, or use zero=0"
                )

    def teardown(self) -> None:
        """See :class:`Applied`."""
        super().teardown()
        self._flats = []
