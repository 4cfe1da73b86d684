"""Every fault that is planted, on what, and what is said of it; those of tp and pp are in ``planted_axes``."""

from __future__ import annotations

import math
from dataclasses import dataclass

MLP = "tests/tasks/mlp_dropout.py"
HARD = "tests/tasks/hard_parts.py"
DOT = "tests/tasks/dot.py"
HYBRID = "dp_replicate=2,dp_shard=2"
# Both shards overflow at the first loss scale, and only rank 1's at the second.
OVERFLOW = (("precision", "fp16"), ("rows", "uneven"), ("batch", "2"))
SHORT = (("size", "17"),)  # batches of 7, 7 and 3
GPT = (("depth", "2"), ("width", "32"), ("context", "16"), ("heads", "2"), ("batch", "7"), ("steps", "5"))


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
    matrix: bool = False  # left to `make matrix`


SEPARATE = "stretto.testing.conditions:separate_memory"
PLANTED = (
    Planted(fault="dropped_reduction", plan="dp=2", step=1, what="gradient", says="their reduction is missing"),
    Planted(
        fault="dropped_shard_reduction",
        plan="dp=2,zero=3",
        step=1,
        what="gradient",
        says="the shards are not the sum over ranks: their reduction is missing",
        under=SEPARATE,
    ),
    Planted(
        fault="wrong_divisor",
        plan="dp=3",
        step=1,
        what="gradient",
        by=2 / 3,
        says="every gradient is 0.333333 times one device's: the sum over ranks has a wrong divisor",
    ),
    Planted(
        fault="other_initial_weights",
        plan="dp=2",
        step=0,
        what="initial weights",
        rank=1,
        says="rank(s) 1 began with other weights",
    ),
    Planted(
        fault="tied_weight_counted_twice",
        task="examples/gpt",
        sets=GPT,
        plan="dp=2",
        step=1,
        what="gradient",
        name="embedding.weight",
        says="only embedding.weight is off, which is also head.weight",
    ),
    Planted(
        fault="nominal_divisor",
        sets=SHORT,
        plan="dp=2",
        step=3,
        what="loss",
        by=4 / 7,
        says="0.428571 times one device's: it was divided by the nominal count (7 samples), not by what it holds (3)",
    ),
    Planted(
        fault="nominal_gradient_divisor",
        sets=SHORT,
        plan="dp=2",
        step=3,
        what="gradient",
        by=4 / 7,
        says="divided by the nominal count (7 samples)",
    ),
    Planted(
        fault="stale_shard",
        plan="dp=2,zero=3",
        step=2,
        what="weight",
        name="0.weight",
        rank=1,
        says="the shard [16:32, 0:12] of 0.weight on rank 1 is what it was before the step",
    ),
    Planted(
        fault="repeated_samples",
        plan="dp=3",
        step=1,
        what="ids",
        rank=1,
        by=3.0,
        says="are counted more than once, on rank(s) 0, 1",
    ),
    Planted(
        fault="applied_on_one_rank",
        plan="dp=2",
        step=2,
        what="weight",
        rank=0,
        says="the step was applied on rank(s) 1 only: nothing moved on rank(s) 0",
    ),
    Planted(
        fault="norm_of_own_shards",
        plan="dp=2,zero=3",
        step=1,
        what="norm",
        says="every gradient is right, their norm is 0.5",
        under=SEPARATE,
    ),
    Planted(
        fault="local_batch_statistics",
        task="examples/digits",
        sets=(("batch", "7"),),
        plan="dp=2",
        step=1,
        what="loss",
        name="1",
        says="the BatchNorm '1' took the statistics of each rank's share",
    ),
    Planted(
        fault="counted_ghost",
        sets=SHORT,
        plan="dp=4",
        step=3,
        what="loss",
        rank=3,
        says="rank 3 has no sample of its own in this batch of 3",
    ),
    Planted(
        fault="unclipped",
        sets=(("clip", "0.1"),),
        plan="dp=2",
        step=1,
        what="weight",
        says="gradients and norm are right, the update is not: other clipping",
    ),
    Planted(
        fault="term_divided_by_anothers_weight",
        task="tests/tasks/terms.py",
        plan="dp=2",
        step=1,
        what="gradient",
        says="is each of words, number divided by its own weight?",
    ),
    Planted(
        fault="replicas_not_added",
        plan=HYBRID,
        step=1,
        what="gradient",
        says="differ between ranks that should hold the same: their sum over the replicas is missing",
    ),
    Planted(
        fault="only_the_last_microbatch",
        plan="dp=2,microbatches=2",
        step=1,
        what="gradient",
        says="a rank's or a microbatch's share is missing",
    ),
    Planted(
        fault="bucket_that_never_fills",
        task=HARD,
        plan="dp=2",
        step=1,
        what="gradient",
        says="differ between ranks that should hold the same: their reduction is missing",
    ),
    Planted(
        fault="shares_of_another_owner",
        plan="dp=2,zero=2",
        step=1,
        what="gradient",
        says="or went to the wrong owner",
    ),
    Planted(
        fault="lost_sparse_rows",
        task=HARD,
        plan="dp=2",
        step=1,
        what="gradient",
        name="table.weight",
        says="all ranks agree on a sum that is not one device's: a rank's share is missing",
    ),
    Planted(
        fault="norm_of_one_replica",
        plan=HYBRID,
        step=1,
        what="norm",
        says="every gradient is right, their norm is 0.670",
    ),
    Planted(
        fault="norm_of_every_replica",
        plan=HYBRID,
        step=1,
        what="norm",
        by=math.sqrt(2) - 1,
        says="it counts each of 2 copies",
    ),
    Planted(
        fault="norm_of_every_copy",
        task=HARD,
        plan="dp=2,zero=3",
        step=1,
        what="norm",
        says="it counts some of them twice",
    ),
    Planted(
        fault="ghost_in_batch_statistics",
        task="examples/digits",
        sets=(("batch", "3"),),
        plan="dp=4",
        step=1,
        what="loss",
        name="1",
        says="which rank 3 runs with weight 0",
    ),
    Planted(
        fault="local_running_statistics",
        task="examples/digits",
        sets=(("batch", "7"),),
        plan="dp=2",
        step=1,
        what="weight",
        name="8.running_mean",
        says="forward updates this buffer from a rank's share of the batch alone",
    ),
    Planted(
        fault="shares_not_gathered",
        plan="dp=2,zero=1",
        step=2,
        what="loss",
        says="were the parts that other ranks update brought here after the last step?",
    ),
    Planted(
        fault="lost_group",
        task=HARD,
        sets=(("kind", "sgd"),),
        plan="dp=2,zero=1",
        step=1,
        what="weight",
        name="turn",
        says="are they updated as another group of the optimizer's?",
    ),
    Planted(
        fault="missed_gradient",
        task=HARD,
        sets=(("words", "8"),),
        plan="dp=2",
        step=1,
        what="weight",
        name="seldom",
        rank=1,
        says="was not updated, while that of rank(s) 0 was: do all know that a gradient reached it?",
    ),
    Planted(
        fault="no_masters",
        task="tests/tasks/lstm.py",
        sets=(("precision", "bf16"),),
        plan="dp=2",
        step=1,
        what="weight",
        says="this is the rounding of bfloat16: the copies are updated, not float32 masters",
    ),
    Planted(
        fault="sums_in_low_precision",
        sets=(("precision", "bf16"),),
        plan="dp=2,microbatches=3",
        step=1,
        what="gradient",
        says="this is the rounding of bfloat16: gradients are added up in it",
    ),
    Planted(
        fault="overflow_decided_alone",
        task=DOT,
        sets=OVERFLOW,
        plan="dp=2,zero=3",
        step=2,
        what="norm",
        rank=0,
        says="its update is left out, but not so on rank(s) 0: all ranks must decide alike",
        under=SEPARATE,
    ),
    Planted(
        fault="scale_halved_alone",
        task=DOT,
        sets=OVERFLOW,
        plan="dp=2,zero=3",
        step=3,
        what="gradient",
        says="or the loss scale is not the same on all",
    ),
    Planted(
        fault="clipped_while_scaled",
        sets=(("precision", "fp16"), ("kind", "sgd"), ("clip", "100")),
        plan="dp=2",
        step=1,
        what="weight",
        says="gradients and norm are right, the update is not: other clipping",
    ),
    Planted(
        fault="other_numbers_in_the_second_forward",
        task="examples/gpt",
        sets=(*GPT, ("dropout", "0.2")),
        plan="dp=2,recompute=full",
        step=2,
        what="gradient",
        says="or a layer is computed otherwise in backward than it was in forward (recompute=full)",
    ),
    Planted(
        fault="statistics_moved_twice",
        task="examples/digits",
        sets=(("batch", "7"),),
        plan="dp=2,recompute=selective",
        step=1,
        what="weight",
        name="1.num_batches_tracked",
        says="or a layer that is computed again in backward changes a buffer twice (recompute=selective)",
    ),
)
