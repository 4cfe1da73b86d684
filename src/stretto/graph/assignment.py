"""Which stage runs each operation, and which rank each stage: all that there is to decide of a cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class Assignment:
    """A cut of a model's work.

    Args:
        stages: of each place in ``Work.nodes`` its stage; a stage needs nothing of a later one.
        ranks: of each stage its rank on the line; the last one's is the last, where the model's output comes out.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def stretches(cls, num_operations: int, starts: Sequence[int] = (), num_ranks: int = 1) -> Assignment:
        """Stages one after the other, dealt to the ranks in turn.

        Args:
            starts: where those after the first begin, rising; the same place twice for a stage without an operation.
        """
        ends = [*starts, num_operations]
        each = (((stage,) * (end - begin)) for stage, (begin, end) in enumerate(zip([0, *starts], ends, strict=True)))
        return cls(tuple(chain.from_iterable(each)), tuple(stage % num_ranks for stage in range(len(ends))))

    @classmethod
    def from_json(cls, found: Mapping[str, Sequence[int]]) -> Assignment:
        """What :meth:`to_json` gave."""
        return cls(tuple(found["stages"]), tuple(found["ranks"]))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)
