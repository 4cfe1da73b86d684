"""Faults of parallel training, by name, to be planted in a worker: a proof that can't find them proves nothing.

Each is a function of the rank that changes the engine *in the calling process only*, before the machinery is assembled.
``stretto.verify.verify(..., plant="stretto.testing.faults:dropped_reduction")`` calls it in every worker of a plan.
"""

from stretto.testing.faults.layers import (
    another_ranks_heads,
    bias_on_every_rank,
    dropout_of_a_part_draws_its_own,
    gradient_of_one_part,
    norm_counts_whole_parameters_on_each_rank,
    partial_sums_not_added,
    samples_counted_on_each_rank,
)
from stretto.testing.faults.measures import (
    ghost_in_batch_statistics,
    local_batch_statistics,
    local_running_statistics,
    norm_of_every_copy,
    norm_of_every_replica,
    norm_of_one_replica,
    norm_of_own_shards,
    unclipped,
)
from stretto.testing.faults.offload import memory_taken_for_another, weights_left_on_the_host
from stretto.testing.faults.precision import (
    clipped_while_scaled,
    no_masters,
    overflow_decided_alone,
    scale_halved_alone,
    sums_in_low_precision,
)
from stretto.testing.faults.recompute import other_numbers_in_the_second_forward, statistics_moved_twice
from stretto.testing.faults.sums import (
    bucket_that_never_fills,
    counted_ghost,
    dropped_reduction,
    dropped_shard_reduction,
    lost_sparse_rows,
    nominal_divisor,
    nominal_gradient_divisor,
    only_the_last_microbatch,
    repeated_samples,
    replicas_not_added,
    shares_of_another_owner,
    term_divided_by_anothers_weight,
    tied_weight_counted_twice,
    wrong_divisor,
)
from stretto.testing.faults.updates import (
    applied_on_one_rank,
    lost_group,
    missed_gradient,
    other_initial_weights,
    shares_not_gathered,
    stale_shard,
)

__all__ = [
    "another_ranks_heads",
    "applied_on_one_rank",
    "bias_on_every_rank",
    "bucket_that_never_fills",
    "clipped_while_scaled",
    "counted_ghost",
    "dropout_of_a_part_draws_its_own",
    "dropped_reduction",
    "dropped_shard_reduction",
    "ghost_in_batch_statistics",
    "gradient_of_one_part",
    "local_batch_statistics",
    "local_running_statistics",
    "lost_group",
    "lost_sparse_rows",
    "memory_taken_for_another",
    "missed_gradient",
    "no_masters",
    "nominal_divisor",
    "nominal_gradient_divisor",
    "norm_counts_whole_parameters_on_each_rank",
    "norm_of_every_copy",
    "norm_of_every_replica",
    "norm_of_one_replica",
    "norm_of_own_shards",
    "only_the_last_microbatch",
    "other_initial_weights",
    "other_numbers_in_the_second_forward",
    "overflow_decided_alone",
    "partial_sums_not_added",
    "repeated_samples",
    "replicas_not_added",
    "samples_counted_on_each_rank",
    "scale_halved_alone",
    "shares_not_gathered",
    "shares_of_another_owner",
    "stale_shard",
    "statistics_moved_twice",
    "sums_in_low_precision",
    "term_divided_by_anothers_weight",
    "tied_weight_counted_twice",
    "unclipped",
    "weights_left_on_the_host",
    "wrong_divisor",
]
