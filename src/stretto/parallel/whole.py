"""zero=0, 1, 2, and 3 on one host: every rank sees the whole model; gradients are left to the sync rule.

From zero=1 on each rank updates its share of the parameters, so that the optimizer's state is cut over the ranks
(ZeRO, arXiv 1910.02054, sections 5.1 and 5.2; what stage 2 adds is how the sync rule keeps gradients). The other shares
come from their owners before the next forward, not in the update: an update sends nothing, so none can half happen.

For zero=3 the ranks of one host hold one copy of the weights between them, in memory that all see (:mod:`.flats`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stretto.parallel._base import Manner, Place, Ranks
from stretto.parallel.copies import dealt_place, narrowed, sparse_parameters, whole_part, whole_place
from stretto.parallel.flats import Flats
from stretto.parallel.layout import Placed
from stretto.parallel.template import Template
from stretto.state import Shares, assign_owners, deal


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
        specs = [spec for name, spec in template.specs.items() if name in shares]
        self._flats = Flats(dict(self.module.named_parameters()), specs, shares, ranks.world, one_copy)
        self._places = self._offloaded.places(self._settle(template, shares))
        self._frozen = {name: p.compute for name, p in self._places.items() if not template.trainable[name]}

    def _settle(self, template: Template, shares: Mapping[str, Shares]) -> dict[str, Place]:
        world = self.ranks.world
        owners = assign_owners((spec for name, spec in template.specs.items() if name not in shares), world.size)
        found: dict[str, Place] = {}
        alone = world.alone()
        for name, parameter in self.module.named_parameters():
            spec = template.specs[name]
            if name in shares:
                found[name] = dealt_place(spec, whole_part(spec), parameter, shares[name], world, alone)
            else:
                found[name] = whole_place(spec, parameter, owners[name] == world.rank, world, name in self._sparse)
        return found

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`; only a BatchNorm does."""
        return self._norm.active

    def _bring(self) -> None:
        """The other shares."""
        self._flats.bring()

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; nothing is reduced here."""
        with self._norm.counting(not ghost):
            yield
        self._check()
        self._flats.check()

    def teardown(self) -> None:
        """See :class:`Applied`."""
        super().teardown()
        del self._flats
