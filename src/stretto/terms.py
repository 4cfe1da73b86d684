"""The terms of one step's loss on one rank: their divisors, their backward, and their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stretto.comm.members import Members
from stretto.data import Piece
from stretto.errors import TaskError
from stretto.parallel import Roots
from stretto.task import Pair, Task


class Terms:
    """What a step's microbatches add up, in float64.

    Backward runs on the sum over the terms of ``losses / divisor``. Where the task says its weights beforehand, a
    term's divisor is its weight over the whole global batch; a single term may do without, and is divided by
    ``nominal``.

    Args:
        nominal: a power of two near the single term's weight.
        names: of the terms, known from an earlier step; None at first.
    """

    def __init__(self, task: Task, group: Members, nominal: float, names: tuple[str, ...] | None) -> None:
        self._task, self._group = task, group
        self.weighs_first = task.has("weights")
        self._names = names if self.weighs_first else ("loss",)
        self._divisors: dict[str, float] = {"loss": nominal}
        self.sums = torch.zeros(0, 2, dtype=torch.float64)

    @property
    def names(self) -> tuple[str, ...]:
        """The terms' names, the same on every rank; known once they are weighed."""
        assert self._names is not None
        return self._names

    @property
    def finite(self) -> bool:
        """Whether this rank's losses are."""
        return bool(self.sums.isfinite().all())

    def weigh(self, pieces: Sequence[Piece], fetched: Sequence[Any] | None) -> None:
        """Finds the divisors, from all ranks' ``weights(batch)``. Every rank must call it."""
        if fetched is not None:
            found = [self._weights(samples) for samples in fetched]
            if self._names is None:
                self._agree(tuple(found[0]))
            total = torch.zeros(len(self.names), dtype=torch.float64)
            for piece, weights in zip(pieces, found, strict=True):
                self._check_names(weights, "weights()")
                if not piece.ghost:
                    total += torch.tensor([weights[name] for name in self.names], dtype=torch.float64)
            self._group.all_reduce(total)
            self._divisors = dict(zip(self.names, total.tolist(), strict=True))
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64)

    def _weights(self, samples: Any) -> dict[str, float]:
        weights = self._task.weights(samples)
        assert weights is not None
        return weights

    def _agree(self, names: tuple[str, ...]) -> None:
        """Sets the names, once all ranks are known to have the same."""
        for rank, theirs in enumerate(self._group.gather_json(list(names))):
            if tuple(theirs) != names:
                raise TaskError(
                    f"task: weights() named the terms {', '.join(names)} on rank {self._group.rank}, and "
                    f"{', '.join(theirs)} on rank {rank}; name every term for every batch, with weight 0 if it has none"
                )
        self._names = names

    def _check_names(self, found: Mapping[str, Any], where: str) -> None:
        if set(found) != set(self.names):
            raise TaskError(
                f"task: {where} has the terms {', '.join(found)}; expected {', '.join(self.names)}: every term for "
                "every batch, with weight 0 where it has none"
            )

    def add(self, pairs: Mapping[str, Pair], samples: Any, ghost: bool, scale: float) -> Roots:
        """Adds one microbatch's sums; returns where its backward begins, and with which gradients.

        Raises:
            TaskError: other terms than expected, a weight other than ``weights(batch)``, or no gradient.
        """
        self._check_names(pairs, "loss()")
        if self.weighs_first:
            self._check_weights(pairs, self._weights(samples))
        roots, weightings = [], []
        for name, (total, _) in pairs.items():
            divisor = self._divisors[name]
            if not divisor and any(self._divisors.values()):
                continue  # no rank has weight for this term, so what it alone uses must see no gradient, not a zero
            # A ghost's gradient is its sample's with a factor of exactly 0.
            factor = 0.0 if ghost or not divisor else scale / divisor
            if total.requires_grad:
                roots.append(total)
                weightings.append(torch.full_like(total, factor))
        if not roots:
            raise TaskError(
                "task: loss() returned a sum without a gradient; it must be computed from the model's output"
            )
        if not ghost:
            for row, name in zip(self.sums, self.names, strict=True):
                row += torch.stack([part.detach().double().cpu() for part in pairs[name]])
        return roots, weightings

    def _check_weights(self, pairs: Mapping[str, Pair], known: Mapping[str, float]) -> None:
        for name, (_, weight) in pairs.items():
            if abs(float(weight) - known[name]) > 1e-6 * max(1.0, abs(known[name])):
                raise TaskError(
                    f"task: the weight of {name!r} is {float(weight):g} by loss() and {known[name]:g} by weights() for "
                    "the same batch; they must be the same number"
                )

    def read(self, ballot: torch.Tensor, step: int) -> dict[str, tuple[float, float]]:
        """Each term's sums over all ranks, from the part of a ballot that ``sums`` went into."""
        rows = ballot.view(-1, 2).tolist()
        for name, (_, weight) in zip(self.names, rows, strict=True):
            if weight < 0:
                raise TaskError(
                    f"task: step {step}: loss() gave weights of {name!r} whose sum is {weight}; "
                    "weights can't be negative"
                )
        return {name: (total, weight) for name, (total, weight) in zip(self.names, rows, strict=True)}
