"""Gradients and losses that are added up, divided or sent wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stretto.data import Piece
from stretto.testing.faults.planting import FAULTY_RANK, Lone, change_decision, note_batches


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


def nominal_divisor(rank: int) -> None:
    """Loss and gradient are divided by what a full batch weighs, also where the batch is short."""
    largest = [0.0]

    def full(decision: Any) -> Any:
        largest[0] = max(largest[0], decision.weight)
        ((name, (loss, _)),) = decision.sums.items()
        return dataclasses.replace(decision, sums={name: (loss, largest[0])})

    change_decision(full)


def nominal_gradient_divisor(rank: int) -> None:
    """Only the gradient is divided by the samples of a full batch; the loss that is shown is right."""
    from stretto.sync.exact import ExactSum

    batches: list[tuple[int, ...]] = []
    note_batches(batches)
    honest = ExactSum.finish

    def finish(self: Any) -> None:
        honest(self)
        self.scale(len(batches[-1]) / max(map(len, batches)))

    ExactSum.finish = finish  # type: ignore[method-assign]


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


def repeated_samples(rank: int) -> None:
    """One rank is given the samples of rank 0."""
    from stretto import step
    from stretto.data import cut

    def cut_again(ids: Sequence[int], num_ranks: int, microbatches: int, rank: int) -> tuple[Piece, ...]:
        return cut(ids, num_ranks, microbatches, 0 if rank == FAULTY_RANK else rank)

    vars(step)["cut"] = cut_again


def counted_ghost(rank: int) -> None:
    """A rank without samples counts the one that it runs to keep the others company."""
    from stretto import step

    honest = step._Microbatch.loss

    def loss(self: Any, output: Any) -> Any:
        kept, self.ghost = self.ghost, False
        found = honest(self, output)
        self.ghost = kept
        return found

    step._Microbatch.loss = loss  # type: ignore[method-assign]


def term_divided_by_anothers_weight(rank: int) -> None:
    """Of a loss with several terms, each is divided by the weight of another before backward."""
    from stretto.terms import Terms

    honest = Terms.weigh

    def weigh(self: Any, pieces: Any, fetched: Any) -> None:
        honest(self, pieces, fetched)
        self._divisors = dict(zip(self._divisors, reversed(self._divisors.values()), strict=True))

    Terms.weigh = weigh  # type: ignore[method-assign]


def replicas_not_added(rank: int) -> None:
    """Shards are summed over the ranks that cut one copy of the weights, and not over the copies (hybrid)."""
    from stretto.sync.exact import ExactSum

    honest = ExactSum._add_replicas

    def add_replicas(self: Any) -> None:
        replicas, self._replicas = self._replicas, Lone
        honest(self)
        self._replicas = replicas

    ExactSum._add_replicas = add_replicas  # type: ignore[method-assign]


def only_the_last_microbatch(rank: int) -> None:
    """What is sent is the gradient of a step's last microbatch; the others' are forgotten."""
    from stretto.sync.exact import ExactSum

    honest = ExactSum.microbatch

    def microbatch(self: Any, last: bool, ghost: bool, ends: bool = True) -> Any:
        for bucket in self._buckets:
            bucket.begin()
        return honest(self, last, ghost, ends)

    ExactSum.microbatch = microbatch  # type: ignore[method-assign]


def bucket_that_never_fills(rank: int) -> None:
    """A bucket with a parameter that nothing uses is never full, and so it is never sent."""
    from stretto.sync.exact import ExactSum

    honest = ExactSum.microbatch

    @contextmanager
    def microbatch(self: Any, last: bool, ghost: bool, ends: bool = True) -> Iterator[None]:
        with honest(self, last, ghost, ends):
            yield
            self._next = len(self._buckets)  # so none is left to be sent

    ExactSum.microbatch = microbatch  # type: ignore[method-assign]


def shares_of_another_owner(rank: int) -> None:
    """Each rank is sent the sum of the rows that its neighbour updates (zero=1 and 2)."""
    from stretto.sync.buckets import GradientBucket

    honest = GradientBucket._reduce

    def reduce(self: Any, flat: torch.Tensor) -> Any:
        sizes = self._bucket.sizes
        if sizes is not None and min(sizes) == max(sizes):
            flat.copy_(flat.roll(sizes[0]))
        return honest(self, flat)

    GradientBucket._reduce = reduce  # type: ignore[method-assign]


def lost_sparse_rows(rank: int) -> None:
    """Of a sparse gradient, the rows of one rank don't arrive."""
    from stretto.comm.members import Members

    if rank != FAULTY_RANK:
        return
    honest = Members.all_gather_sparse

    def all_gather_sparse(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.coalesce()
        return honest(self, torch.sparse_coo_tensor(mine.indices()[:, :0], mine.values()[:0], mine.shape))

    Members.all_gather_sparse = all_gather_sparse  # type: ignore[method-assign]
