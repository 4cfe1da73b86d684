"""The contract of a layout.

``apply(template, plan, group)`` gives an :class:`Applied`: a module that is called like the user's own and that knows,
for every logical tensor, which part lies here. First build, resume and recovery are the same two calls, ``apply`` and
``import_state``, over another source. The user's module is never touched: layouts are built on copies of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.comm.group import Group
from stretto.comm.members import Members
from stretto.state import Box, Part, Shares, Slice, StateSource, TensorSpec

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments and keywords of a call."""


@dataclass(frozen=True)
class Ranks:
    """With whom a rank shares what.

    Args:
        everyone: the group.
        world: all that share the global batch, each with its own samples: the data-parallel ranks.
        tensor: those that cut the model's layers between them, and have the same samples.
        shards: those that cut one copy of the weights between them (the mesh's ``dp_shard``).
        replicas: those that hold the same part of another copy (``dp_replicate``).
    """

    everyone: Group
    world: Members
    shards: Members
    replicas: Members
    tensor: Members

    @property
    def counts(self) -> bool:
        """Whether this rank answers for its samples: one of those that have the same ones does."""
        return self.tensor.rank == 0


@dataclass(frozen=True)
class Manner:
    """What a layout has to know beside the plan.

    Args:
        compute: the type of the copies that forward uses in place of float32 parameters; float32: the parameters.
        whole_tensors: the optimizer looks at whole tensors, so each has one owner who updates all of it.
        reduce_once: gradients of several microbatches may be added up whole on each rank and reduced once a step;
            otherwise they are reduced after each microbatch, and only this rank's part is kept.
        recompute: which activations backward computes again: ``none``, ``selective`` or ``full``.
        offload: what lies on the host: ``none``, ``optimizer``, ``activations`` or ``all``.
        surround: what surrounds forward, and so what of it is computed again.
        example: a call of the model, for layouts that trace it.
    """

    compute: torch.dtype = torch.float32
    whole_tensors: bool = False
    reduce_once: bool = True
    recompute: str = "none"
    offload: str = "none"
    surround: Callable[[], AbstractContextManager[Any]] = nullcontext
    example: Call | None = None


@dataclass(frozen=True)
class Place:
    """Where one logical parameter lies on this rank.

    Args:
        spec: name, logical shape and type; ``spec.name`` is the parameter's name in the model.
        part: what of it lies here; mostly one box.
        local: a plain parameter over that part, of shape ``part.shape``; what an optimizer updates.
        compute: the module's own parameter, which forward uses and at which backward leaves the gradient; in a lower
            precision, or where ``local`` lies on the host, a copy of it, which :meth:`Applied.refresh` makes.
        owner: this rank answers for the part in checkpoints and digests.
        summed: the layout itself adds its gradient over the ranks that cut it, and the sync rule over the replicas;
            otherwise the sync rule adds it over all.
        shares: which part of it each rank updates, where each needs the sum of its own part alone; None where every
            rank updates all that it holds.
        sparse: its gradients are sparse.
    """

    spec: TensorSpec
    part: Part
    local: nn.Parameter
    compute: nn.Parameter
    owner: bool
    summed: bool = False
    shares: Shares | None = None
    sparse: bool = False

    @property
    def copied(self) -> torch.Tensor | None:
        """What of ``compute`` :meth:`Applied.refresh` fills from ``local``; None where ``local`` is that memory."""
        here = self.compute.detach()
        if self.summed:
            here = cast(DTensor, here)._local_tensor
        elif not self.cut:
            here = here[self.box.within(Box.whole(self.spec.shape))]
        same = here.untyped_storage()._cdata == self.local.untyped_storage()._cdata
        return None if same else here

    @property
    def box(self) -> Box:
        """The first box of the part."""
        return self.part.boxes[0]

    @property
    def cut(self) -> bool:
        """Whether ``tp`` cuts it, so that ranks that share their samples have different parts."""
        return self.part.cut

    @property
    def pieces(self) -> list[tuple[Box, tuple[slice, ...]]]:
        """Each box, and where it lies in ``local``."""
        if len(self.part.boxes) == 1:
            return [(self.box, (slice(None),) * len(self.box.starts))]
        ahead = (slice(None),) * self.part.dim
        return [(box, (*ahead, where)) for box, where in self.part.places()]

    def gather(self, read: Callable[[Box], torch.Tensor]) -> torch.Tensor:
        """What lies here, put together from its boxes."""
        found = [read(box) for box, _ in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, self.part.dim)

    @property
    def lead(self) -> bool:
        """Whether this rank answers for what belongs to the whole parameter, such as its step counter."""
        return self.owner and not any(self.box.starts)

    @property
    def absent(self) -> bool:
        """Whether no element of the parameter lies here, though it has some."""
        return not self.box.numel and bool(self.spec.numel)


class Applied(Protocol):
    """A template laid out over a group. Every rank of the group must make the same calls in the same order."""

    module: nn.Module
    ranks: Ranks
    notes: tuple[str, ...]  # what there is to say to people; the same on every rank
    reduces_once: bool  # whether gradients wait, whole, for the last microbatch, as :class:`Manner` asks if it can be

    @property
    def places(self) -> Mapping[str, Place]:
        """Every parameter by name, in the model's order; the same names on every rank."""

    @property
    def communicates(self) -> bool:
        """Whether forward or backward enter collectives of the layout's own."""

    def refresh(self) -> None:
        """Makes the weights that forward uses those of the last update. Every rank must call it before forward."""

    def updated(self) -> None:
        """Tells that ``local`` parameters have changed; sends nothing."""

    def saving(self) -> AbstractContextManager[None]:
        """Surrounds a microbatch's forward and loss, and what they keep for backward."""

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
