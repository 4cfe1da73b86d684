"""What is known of one device's steps and of each rank's, as plain data that travels as JSON. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Sort = Literal["parameter", "made", "arrived"]
Kind = Literal["gradient", "weight", "buffer", "state"]


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One step on one device.

    Args:
        loss: of the global batch, before the update; NaN where it had no weight.
        norm: of its gradient, before clipping.
        weight: sum of the loss weights.
        pieces: the sample ids of each piece of the cut, some may be empty; all together are the global batch.
        scales: largest magnitude on one device by measure: ``gradient``, ``weight``, ``state/KEY``, or the full name
            of a tensor of whole numbers, which is measured by itself.
    """

    step: int
    loss: float
    norm: float
    weight: float
    pieces: tuple[tuple[int, ...], ...]
    scales: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ReferenceRecord:
    """What one device did, apart from its tensors, which are in files.

    Args:
        dtype: ``float64`` or ``float32``.
        batch: samples of a full global batch.
        batch_norms: modules that normalise over the batch; where there are any the batch was not cut.
        random: random numbers were drawn in forward or loss.
        aliases: the other names of each tied parameter.
        terms: names of the loss's terms.
        cut_inside: what it is compared with is a plan that cuts sums inside layers (``tp``).
        scales: of the initial weights, see :class:`ReferenceStep`.
    """

    dtype: str
    batch: int
    batch_norms: tuple[str, ...]
    random: bool
    aliases: Mapping[str, tuple[str, ...]]
    scales: Mapping[str, float]
    steps: tuple[ReferenceStep, ...]
    terms: tuple[str, ...] = ()
    cut_inside: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ReferenceRecord:
        """The inverse of :meth:`to_json`."""
        steps = tuple(
            ReferenceStep(**{**step, "pieces": tuple(tuple(piece) for piece in step["pieces"])})
            for step in record["steps"]
        )
        aliases = {name: tuple(others) for name, others in record["aliases"].items()}
        return cls(
            **{
                **record,
                "batch_norms": tuple(record["batch_norms"]),
                "aliases": aliases,
                "steps": steps,
                "terms": tuple(record["terms"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class TensorFact:
    """One rank's part of one tensor against one device's.

    Args:
        rel: largest difference over the largest magnitude of the tensor's kind on one device.
        share: largest magnitude of this part on one device, over the largest of its kind.
        box: which part it is, as text; equal on ranks that hold copies of each other.
        whole: the part is the whole tensor.
        differs: ``rel`` is beyond tolerance. What follows is known only then, except ``unchanged``.
        ratio: the factor by which one device's values come nearest to this rank's; None where those are all zero.
        residual: what is left after that factor, over the part's largest magnitude.
        digest: equal on two ranks whose parts are bit-equal.
        missing: the side that has no such tensor, ``plan`` or ``one device``, or nothing.
        unchanged: a weight or state is what it was before the step.
    """

    kind: Kind
    name: str
    rel: float
    share: float
    box: str
    whole: bool
    differs: bool
    ratio: float | None = None
    residual: float | None = None
    digest: str = ""
    missing: str = ""
    unchanged: bool = False


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step on one rank against one device; step 0 holds the initial weights alone.

    Args:
        ids: samples that this rank ran and counted, in order.
        ghosts: samples that it ran with weight 0.
        weight: sum of the loss weights over all ranks.
        gradient: largest relative difference of its kind on this rank, likewise ``weights`` (with buffers), ``state``.
        tensors: every tensor of the step, only where something differs and nothing did in an earlier step.
    """

    step: int
    ids: tuple[int, ...] = ()
    ghosts: tuple[int, ...] = ()
    weight: float = 0.0
    loss: float = 0.0
    loss_ratio: float | None = None
    norm: float = 0.0
    norm_ratio: float | None = None
    gradient: float = 0.0
    weights: float = 0.0
    state: float = 0.0
    tensors: tuple[TensorFact, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The first value of one rank's forward that isn't one device's.

    Args:
        place: in the traced graph, the same on every rank.
        kind: a parameter (or buffer) that the rank computes with; what it made; or what came from another stage.
        name: of the parameter, or of the module in whose forward the operation is; empty for the model's own.
        operation: empty for a parameter.
        microbatch: counted from 0.
        by: largest difference over the largest magnitude of the value on one device.
    """

    place: int
    kind: Sort
    name: str
    operation: str
    microbatch: int
    by: float

    @property
    def order(self) -> tuple[int, bool, int]:
        """What was computed first comes first: a value is made before it arrives."""
        return self.place, self.kind == "arrived", self.microbatch


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """All that one rank saw.

    Args:
        share: which share of each batch it has; ranks that tp joins have the same one.
        left_out: elements that this rank answers for and left out, by parameter.
    """

    rank: int
    share: int
    steps: tuple[StepFacts, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankFacts:
        """The inverse of :meth:`to_json`."""
        steps = tuple(
            StepFacts(
                **{
                    **step,
                    "ids": tuple(step["ids"]),
                    "ghosts": tuple(step["ghosts"]),
                    "tensors": tuple(TensorFact(**fact) for fact in step["tensors"]),
                }
            )
            for step in record["steps"]
        )
        return cls(rank=record["rank"], share=record["share"], steps=steps, left_out=dict(record["left_out"]))
