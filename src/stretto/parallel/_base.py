"""The contract of a layout.

``apply(template, plan, group)`` gives an :class:`Applied`: a module that is called like the user's own and that knows,
for every logical tensor, which part lies here. First build, resume and recovery are the same two calls, ``apply`` and
``import_state``, over another source. The user's module is never touched: layouts are built on copies of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.comm.group import Group
from stretto.comm.line import Line
from stretto.comm.members import Members
from stretto.graph.assignment import Assignment
from stretto.graph.trace import Scoring
from stretto.schedule import Schedule
from stretto.state import Box, Part, Shares, Slice, StateSource, TensorSpec

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments and keywords of a call."""


Roots = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Where backward begins, and with which gradients."""

Around = Callable[..., AbstractContextManager[None]]
"""What surrounds backward of a microbatch, and mostly its forward: see `sync.Sync.microbatch`."""


@dataclass(frozen=True)
class Copies:
    """How the weights lie over the data-parallel ranks.

    Args:
        shards: those that cut one copy of the weights between them (the mesh's ``dp_shard``).
        replicas: those that hold the same part of another copy (``dp_replicate``).
        alike: those that hold the same of what ``tp`` leaves whole: in other copies too.
    """

    shards: Members
    replicas: Members
    alike: Members


@dataclass(frozen=True)
class Ranks:
    """With whom a rank shares what.

    Args:
        everyone: the group.
        world: all that share the global batch, each with its own samples, and hold the same layers: the data-parallel
            ranks.
        tensor: those that cut the model's layers between them, and have the same samples.
        stage: those that have the same stages of the model, each of their layers whole or a part of it.
        line: those that have stages of the model between them, in their order, and the same samples; they send messages
            to one another.
        holders: of some ranks of a pipeline, those that add up the gradient of what all of these hold, and those among
            whom it is the same then; every rank must call it, in one order.
        copies: how the weights lie over ``world``.
    """

    everyone: Group
    world: Members
    copies: Copies
    tensor: Members
    stage: Members
    line: Line
    holders: Callable[[Sequence[int]], tuple[Members, Members]]

    @property
    def shards(self) -> Members:
        """Those that cut one copy of the weights between them."""
        return self.copies.shards

    @property
    def replicas(self) -> Members:
        """Those that hold the same part of another copy."""
        return self.copies.replicas

    @property
    def hybrid(self) -> bool:
        """Whether there are several copies of the weights, and each is cut."""
        return self.shards.size > 1 and self.replicas.size > 1

    @property
    def has_output(self) -> bool:
        """Whether the model's output comes out at this rank: in a pipeline, at the last stage."""
        return self.line.rank == self.line.size - 1

    @property
    def counts(self) -> bool:
        """Whether this rank answers for its samples: one of those that have the same ones does."""
        return self.tensor.rank == 0 and self.has_output


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
        example: one microbatch, for layouts that trace the model and measure it.
        assignment: the stages, as another layout of the same model has found them; None: by measurement.
    """

    compute: torch.dtype = torch.float32
    whole_tensors: bool = False
    reduce_once: bool = True
    recompute: str = "none"
    offload: str = "none"
    surround: Callable[[], AbstractContextManager[Any]] = nullcontext
    example: Example | None = None
    assignment: Assignment | None = None


def _here(body: Callable[[], Any]) -> Any:
    return body()


@dataclass(frozen=True)
class Example:
    """A microbatch to look at a model with.

    Args:
        call: what the model is called with.
        loss: where backward would begin.
        scoring: what the loss is made by, for a trace of both; None: it can't be.
        why_not: the reason then.
        surround: what surrounds forward and loss.
        aside: runs what looks at the whole model and gives JSON, where it can so that none of its memory stays.
    """

    call: Call
    loss: Callable[[Any], Roots]
    scoring: Scoring | None = None
    why_not: str = ""
    surround: Callable[[], AbstractContextManager[Any]] = nullcontext
    aside: Callable[[Callable[[], Any]], Any] = _here

    def given(self, scored: bool) -> Any:
        """See :func:`given_of`."""
        return given_of(self.call, self.scoring.batch if self.scoring else None, scored)


def given_of(call: Call, batch: Any, scored: bool) -> tuple[Any, ...]:
    """What a trace is called with, as a tree: arguments and keywords, and with the loss the batch."""
    arguments, keywords = call
    return (arguments, dict(keywords), batch) if scored else (arguments, dict(keywords))


@dataclass(frozen=True)
class Holders:
    """With whom a rank holds a part of a parameter.

    Args:
        adds: those whose gradients of it add up to its gradient.
        alike: those that hold the same part, and the same gradient of it then; they share what counts it once.
        owner: this rank answers for the part in checkpoints and digests.
        copies: those that hold the part in other copies of the weights, where ``adds`` have one copy: the sums of all
            copies are to be added up too.
        lent: all but what this rank updates is only here while the layout has gathered it.
    """

    adds: Members
    alike: Members
    owner: bool
    copies: Members | None = None
    lent: bool = False


@dataclass(frozen=True)
class Place:
    """Where one logical parameter lies on this rank.

    Args:
        spec: name, logical shape and type; ``spec.name`` is the parameter's name in the model.
        part: what of it lies here; mostly one box.
        local: a plain parameter over that part, of shape ``part.shape``; what an optimizer updates.
        compute: the module's own parameter, which forward uses and at which backward leaves the gradient; in a lower
            precision, or where ``local`` lies on the host, a copy of it, which :meth:`Applied.refresh` makes.
        holders: who holds the same.
        summed: the layout itself adds its gradient over the ranks that cut it, and the sync rule over the replicas;
            otherwise the sync rule adds it over all.
        shares: of ``compute``, which part each rank of those whose gradients add up updates, where each needs the sum
            of its own part alone; None where every rank updates all that it holds.
        sparse: its gradients are sparse.
    """

    spec: TensorSpec
    part: Part
    local: nn.Parameter
    compute: nn.Parameter
    holders: Holders
    summed: bool = False
    shares: Shares | None = None
    sparse: bool = False

    @property
    def copied(self) -> torch.Tensor | None:
        """What of ``compute`` :meth:`Applied.refresh` fills from ``local``; None where ``local`` is that memory, or
        the layout gathers ``compute`` from it."""
        if self.lent:
            return None
        here = self.compute.detach()
        if self.summed:
            here = cast(DTensor, here)._local_tensor
        elif self.shares is not None:
            here = here[self.shares[self.adds.rank].within(Box.whole(tuple(here.shape)))]
        same = here.untyped_storage()._cdata == self.local.untyped_storage()._cdata
        return None if same else here

    @property
    def owner(self) -> bool:
        """Whether this rank answers for the part."""
        return self.holders.owner

    @property
    def adds(self) -> Members:
        """Those whose gradients of it add up."""
        return self.holders.adds

    @property
    def alike(self) -> Members:
        """Those that hold the same part."""
        return self.holders.alike

    @property
    def lent(self) -> bool:
        """Whether ``compute`` has memory only while the layout has gathered it."""
        return self.holders.lent

    @property
    def copies(self) -> Members | None:
        """Those that hold it in other copies of the weights."""
        return self.holders.copies

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
        return self.part.pieces

    def gather(self, read: Callable[[Box], torch.Tensor]) -> torch.Tensor:
        """What lies here, put together from its boxes."""
        found = [read(box) for box, _ in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, self.part.dim)

    @property
    def lead(self) -> bool:
        """Whether this rank answers for what belongs to the whole parameter, such as its step counter."""
        return self.owner and not any(self.box.starts)

    @property
    def elsewhere(self) -> bool:
        """Whether it belongs to other stages of the model than this rank's."""
        return not self.compute.numel() and bool(self.spec.numel)

    @property
    def absent(self) -> bool:
        """Whether no element of the parameter lies here, though it has some."""
        return not self.box.numel and bool(self.spec.numel)


class Microbatch(Protocol):
    """One microbatch of a step, as a layout runs it."""

    ghost: bool  # it counts for nothing
    samples: Any  # once it was asked for its call

    def call(self) -> Call:
        """What the model is called with; the first time, its samples are fetched."""

    def forward(self, run: Callable[..., Any]) -> Any:
        """The output of ``run``, called with that, with random numbers and types as they belong to the microbatch."""

    def loss(self, output: Any) -> Roots:
        """Where its backward begins."""

    def roots(self, terms: Any) -> Roots:
        """Likewise, where ``run`` has gone on to the terms of the loss."""

    def backward(self, roots: Roots) -> None:
        """Runs it."""

    def span(self, what: str, stage: int | None = None) -> AbstractContextManager[None]:
        """Surrounds what is to be noted as work on it."""


class Applied(Protocol):
    """A template laid out over a group. Every rank of the group must make the same calls in the same order."""

    module: nn.Module
    ranks: Ranks
    notes: tuple[str, ...]  # what there is to say to people; the same on every rank
    schedule: Schedule | None  # of its stages, where it has several
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

    def train(self, microbatches: Sequence[Microbatch], around: Around) -> None:
        """Forward and backward of a step's microbatches, in the layout's own order. Every rank must call it."""

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
