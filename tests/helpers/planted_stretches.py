"""The faults of towers, and of stages that are computed again."""

from __future__ import annotations

from planting import Planted

EVEN = "stretto.testing.conditions:even_stages"
PIECES = "stretto.testing.conditions:small_pieces"
DIGITS, BRANCHES = "examples/digits", "tests/tasks/branches.py"

TOWERS = (
    Planted(
        fault="gradient_of_a_tower_twice",
        task="tests/tasks/towers.py",
        plan="branch=2",
        step=1,
        what="gradient",
        name="thing.2.weight",
        rank=0,
        under=EVEN,
        says="only rank(s) 0 are off",
    ),
    Planted(
        fault="tied_gradient_of_one_stage",
        task=BRANCHES,
        sets=(("kind", "siamese"),),
        plan="branch=2,pp=2",
        step=1,
        what="gradient",
        name="encoder.1.4.bias",
        under=EVEN,
        says="all ranks agree on a sum that is not one device's: a rank's share is missing or weighed wrongly",
        matrix=True,
    ),
    Planted(
        fault="generator_not_handed_on",
        task=BRANCHES,
        sets=(("kind", "siamese"), ("rate", "0.3")),
        plan="branch=2,pp=2",
        step=1,
        what="loss",
        name="encoder.1.5",
        under=EVEN,
        says="the first that is off is what encoder.1.5 gives (dropout, microbatch 1",
    ),
    Planted(
        fault="gradient_of_one_consumer",
        task=BRANCHES,
        plan="branch=2,pp=2",
        step=1,
        what="gradient",
        name="stem.0.bias",
        rank=0,
        under=EVEN,
        says="right down to branches.0.0.weight, and off from stem.0.bias on",
        matrix=True,
    ),
    Planted(
        fault="norm_counts_a_tied_table_on_each_stage",
        task=BRANCHES,
        sets=(("kind", "siamese"),),
        plan="branch=2,pp=2",
        step=1,
        what="norm",
        under=EVEN,
        says="it counts some of them twice",
        matrix=True,
    ),
    Planted(
        fault="gradient_of_a_tower_twice",
        task="tests/tasks/towers.py",
        plan="branch=2,pp=2,microbatches=2",
        step=1,
        what="gradient",
        rank=0,
        under=EVEN,
        says="only rank(s) 0 are off",
        matrix=True,
    ),
)

AGAIN = (
    Planted(
        fault="other_numbers_in_the_second_forward",
        plan="tp=2,pp=2,recompute=full",
        step=2,
        what="gradient",
        under=PIECES,
        says="or a layer is computed otherwise in backward than it was in forward (recompute=full)",
    ),
    Planted(
        fault="other_numbers_in_the_second_forward",
        plan="pp=2,microbatches=2,recompute=selective",
        step=2,
        what="gradient",
        under=PIECES,
        says="or a layer is computed otherwise in backward than it was in forward (recompute=selective)",
        matrix=True,
    ),
    Planted(
        fault="stages_change_buffers_twice",
        task=DIGITS,
        sets=(("batch", "7"),),
        plan="pp=2,recompute=selective",
        step=1,
        what="weight",
        name="1.num_batches_tracked",
        under=f"{EVEN},{PIECES}",
        says="or a layer that is computed again in backward changes a buffer twice (recompute=selective)",
    ),
)
