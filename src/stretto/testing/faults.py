"""Faults of parallel training, by name, to be planted in a worker: a proof that can't find them proves nothing.

Each is a function of the rank that changes the engine *in the calling process only*, before the machinery is assembled.
``stretto.verify.verify(..., plant="stretto.testing.faults:dropped_reduction")`` calls it in every worker of a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from stretto.data import Piece

FAULTY_STEP: Final = 2
"""Faults of a single step happen at this one, so that it must be found, not guessed."""
FAULTY_RANK: Final = 1
"""Faults of a single rank happen on this one."""


def dropped_reduction(rank: int) -> None:
    """Gradients are not added over ranks (zero=0)."""
    from stretto.sync.buckets import GradientBucket

    def reduce(self: Any, flat: torch.Tensor) -> None:
        return None

    GradientBucket._reduce = reduce  # type: ignore[method-assign]


def dropped_shard_reduction(rank: int) -> None:
    """Shards of gradients hold this rank's own share, not the sum over ranks (zero=3)."""
    import torch.distributed as dist

    def own_share(output: torch.Tensor, input: torch.Tensor, *args: Any, **keywords: Any) -> None:
        output.copy_(input.chunk(input.numel() // output.numel())[rank])

    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # torch's new name and its old one
        setattr(dist, name, own_share)


def wrong_divisor(rank: int) -> None:
    """Gradients are divided by the number of ranks once too often."""
    from stretto.sync.exact import ExactSum

    honest = ExactSum.finish

    def finish(self: Any) -> None:
        honest(self)
        self.scale(1.0 / self._world.size)

    ExactSum.finish = finish  # type: ignore[method-assign]


def other_initial_weights(rank: int) -> None:
    """One rank begins with its own initialisation."""
    if rank != FAULTY_RANK:
        return
    from stretto.parallel import whole

    honest = whole.Whole.import_state

    def import_state(self: Any, source: Any) -> None:
        honest(self, source)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for place in self.places.values():
                place.local.add_(0.01 * torch.rand(place.local.shape, generator=generator))

    whole.Whole.import_state = import_state  # type: ignore[method-assign]


def tied_weight_counted_twice(rank: int) -> None:
    """The gradient of each parameter that has two names is added once for each."""
    from stretto.parallel.template import Template
    from stretto.sync.exact import ExactSum

    built = Template.build
    honest = ExactSum.finish
    tied: list[str] = []

    def build(self: Any, device: torch.device, types: Mapping[str, torch.dtype] | None = None) -> Any:
        every = [id(p) for _, p in self.structure.named_parameters(remove_duplicate=False)]
        tied[:] = [name for name, p in self.structure.named_parameters() if every.count(id(p)) > 1]
        return built(self, device, types)

    def finish(self: Any) -> None:
        honest(self)
        for name in tied:
            gradient = self.gradients()[name]
            if gradient is not None:
                gradient.mul_(2)

    Template.build = build  # type: ignore[method-assign]
    ExactSum.finish = finish  # type: ignore[method-assign]


def nominal_divisor(rank: int) -> None:
    """Loss and gradient are divided by what a full batch weighs, also where the batch is short."""
    largest = [0.0]

    def full(decision: Any) -> Any:
        largest[0] = max(largest[0], decision.weight)
        ((name, (loss, _)),) = decision.sums.items()
        return dataclasses.replace(decision, sums={name: (loss, largest[0])})

    _change_decision(full)


def nominal_gradient_divisor(rank: int) -> None:
    """Only the gradient is divided by the samples of a full batch; the loss that is shown is right."""
    from stretto.sync.exact import ExactSum

    batches: list[tuple[int, ...]] = []
    _note_batches(batches)
    honest = ExactSum.finish

    def finish(self: Any) -> None:
        honest(self)
        self.scale(len(batches[-1]) / max(map(len, batches)))

    ExactSum.finish = finish  # type: ignore[method-assign]


def stale_shard(rank: int) -> None:
    """On one rank the first parameter misses one update."""

    def forgetful(gradients: dict[str, Any]) -> dict[str, Any]:
        return {**gradients, next(iter(gradients)): None}

    if rank == FAULTY_RANK:
        _change_update(forgetful)


def repeated_samples(rank: int) -> None:
    """One rank is given the samples of rank 0."""
    from stretto import step
    from stretto.data import cut

    def cut_again(ids: Sequence[int], num_ranks: int, microbatches: int, rank: int) -> tuple[Piece, ...]:
        return cut(ids, num_ranks, microbatches, 0 if rank == FAULTY_RANK else rank)

    vars(step)["cut"] = cut_again


def applied_on_one_rank(rank: int) -> None:
    """One step is applied on one rank only."""
    if rank != FAULTY_RANK:
        _change_update(lambda gradients: None)


def norm_of_own_shards(rank: int) -> None:
    """The gradient norm leaves out what lies on other ranks: nothing adds the squares up."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        own = float(self._on.sync.square_sum())
        return dataclasses.replace(honest(self, step, terms), square_sum=own)

    Stepper._vote = vote  # type: ignore[method-assign]


def local_batch_statistics(rank: int) -> None:
    """BatchNorm normalises each rank's share with that share's own statistics."""
    from stretto.parallel.batchnorm import GlobalBatchNorm

    def leave_alone(self: Any, module: Any, group: Any) -> None:
        self.group, self.counts, self._changed = group, True, []

    GlobalBatchNorm.__init__ = leave_alone  # type: ignore[method-assign]


def counted_ghost(rank: int) -> None:
    """A rank without samples counts the one that it runs to keep the others company."""
    from stretto.step import Stepper

    honest = Stepper._run

    def run(self: Any, piece: Any, *rest: Any) -> None:
        honest(self, dataclasses.replace(piece, ghost=False), *rest)

    Stepper._run = run  # type: ignore[assignment, method-assign]


def unclipped(rank: int) -> None:
    """Gradients are applied without clipping."""
    from stretto.parallel import BoundOptimizer
    from stretto.sync.exact import ExactSum

    factors: list[float] = []
    scale, update = ExactSum.scale, BoundOptimizer.step

    def remember(self: Any, factor: float) -> None:
        factors.append(factor)
        scale(self, factor)

    def step(self: Any, gradients: Mapping[str, Any]) -> None:
        for gradient in gradients.values():
            if gradient is not None:
                gradient.mul_(1.0 / min(1.0, factors[-1]))
        update(self, gradients)

    ExactSum.scale = remember  # type: ignore[method-assign]
    BoundOptimizer.step = step  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------ how to plant


def _change_decision(change: Callable[[Any], Any]) -> None:
    """Lets ``change`` replace what the vote decides."""
    from stretto.step import Stepper

    honest = Stepper._vote

    def vote(self: Any, step: int, terms: Any) -> Any:
        return change(honest(self, step, terms))

    Stepper._vote = vote  # type: ignore[method-assign]


def _change_update(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Lets ``change`` replace the gradients of the faulty step's update; None leaves the update out."""
    from stretto.parallel import BoundOptimizer

    honest, calls = BoundOptimizer.step, [0]

    def step(self: Any, gradients: Mapping[str, Any]) -> None:
        calls[0] += 1
        changed = change(dict(gradients)) if calls[0] == FAULTY_STEP else gradients
        if changed is not None:
            honest(self, changed)

    BoundOptimizer.step = step  # type: ignore[method-assign]


def _note_batches(into: list[tuple[int, ...]]) -> None:
    """Notes the ids of every global batch that is stepped on."""
    from stretto.step import Stepper

    honest = Stepper.step

    def step(self: Any, batch: Any) -> Any:
        into.append(batch.ids)
        return honest(self, batch)

    Stepper.step = step  # type: ignore[method-assign]
