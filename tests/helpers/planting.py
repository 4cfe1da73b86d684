"""What there is to say of a planted fault, and on what faults are planted."""

from __future__ import annotations

from dataclasses import dataclass

MLP = "tests/tasks/mlp_dropout.py"
HARD = "tests/tasks/hard_parts.py"
DOT = "tests/tasks/dot.py"
HYBRID = "dp_replicate=2,dp_shard=2"
# Both shards overflow at the first loss scale, and only rank 1's at the second.
OVERFLOW = (("precision", "fp16"), ("rows", "uneven"), ("batch", "2"))
SHORT = (("size", "17"),)  # batches of 7, 7 and 3
GPT = (("depth", "2"), ("width", "32"), ("context", "16"), ("heads", "2"), ("batch", "7"), ("steps", "5"))
CUT = (("depth", "1"), ("width", "32"), ("context", "16"), ("heads", "4"), ("batch", "4"))
APART = "stretto.testing.conditions:host_apart"
SEPARATE = "stretto.testing.conditions:separate_memory"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault, where it is planted, and what the first divergence must say; None where any value will do."""

    fault: str
    plan: str
    step: int
    what: str
    says: str
    task: str = MLP
    sets: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    rank: int | None = None
    by: float | None = None
    under: str | None = None  # a condition
