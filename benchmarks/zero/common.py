"""What every peer's step shares with stretto's: the samples, the first weights, the loss and its reduction.

A peer says how it wraps the model, runs a backward and updates; the rest of a step is written here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, Dataset

from stretto.comm.group import Group
from stretto.data import Position, Sampler, cut, seed_everything
from stretto.task import Task


@dataclass(frozen=True)
class Case:
    """What one comparison's arms train.

    Args:
        stage: of ZeRO, 1 to 3.
        pieces: microbatches in which a worker takes its share of a batch.
        gloo: torch's Gloo group over all workers, which the peers use; stretto's arm uses ``group``.
    """

    task: Task
    dataset: Dataset[Any]
    stage: int
    pieces: int
    group: Group
    gloo: dist.ProcessGroup

    @property
    def plan(self) -> str:
        """As stretto writes it."""
        pieces = f",microbatches={self.pieces}" if self.pieces > 1 else ""
        return f"dp={self.group.size},zero={self.stage}{pieces}"


class Peer(Protocol):
    """Another system's way to train, after its own documentation."""

    model: Callable[..., Any]
    factor: float  # what undoes its averaging: the loss is multiplied by it

    def microbatch(self, last: bool) -> Any:
        """A context for the forward and backward of one microbatch."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of ``loss``."""

    def update(self, last: bool) -> None:
        """Follows each microbatch; after the last one clips, updates and empties the gradients."""


def gloo_group(group: Group) -> dist.ProcessGroup:
    """The Gloo group that peers communicate over: ``group``'s own where that is Gloo. Every rank must call it."""
    if dist.get_backend(group.process_group) == "gloo":
        return group.process_group
    found: dist.ProcessGroup = dist.new_group(backend="gloo")
    return found


@contextmanager
def as_default(chosen: dist.ProcessGroup) -> Iterator[None]:
    """Makes ``chosen`` torch's default group for a while: some peers can't be told another one."""
    before = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(chosen)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


def fresh_model(task: Task) -> nn.Module:
    """The task's model with the weights that stretto's arm begins with."""
    seed_everything(task.recipe.seed)
    return task.model()


def microbatches(case: Case) -> Iterator[Any]:
    """This rank's microbatches without end, through torch's loader: the samples that stretto's arm takes."""
    sampler = Sampler(len(case.dataset), case.task.recipe.batch, case.task.recipe.seed)  # type: ignore[arg-type]
    handles = sampler.batches(1, Position())
    ids = (
        list(piece.ids)
        for handle in handles
        for piece in cut(handle.ids, case.group.size, case.pieces, case.group.rank)
    )
    return iter(DataLoader(case.dataset, batch_sampler=ids))  # type: ignore[arg-type]


def stepping(peer: Peer, case: Case) -> Callable[[], float]:
    """One step of ``peer``: the gradient of sum(losses) / sum(weights) over the global batch. It returns that loss.

    The weights are those of the targets, known before the first forward; so their sum costs no waiting in the middle.
    """
    source = microbatches(case)

    def step() -> float:
        with as_default(case.gloo):
            batches = [next(source) for _ in range(case.pieces)]
            weight = torch.tensor(float(sum(batch[1].numel() for batch in batches)))
            dist.all_reduce(weight)
            total = torch.zeros(())
            for index, batch in enumerate(batches):
                last = index == case.pieces - 1
                with peer.microbatch(last):
                    loss, _ = case.task.losses(peer.model(batch[0]), batch)["loss"]
                    peer.backward(loss * (peer.factor / weight))
                    total += loss.detach()
                    peer.update(last)
            dist.all_reduce(total)
            return float(total / weight)

    return step
