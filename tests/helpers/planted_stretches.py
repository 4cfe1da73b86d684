"""The faults of towers, and of stages that are computed again."""

from __future__ import annotations

from planting import Planted

EVEN = "stretto.testing.conditions:even_stages"
PIECES = "stretto.testing.conditions:small_pieces"
DIGITS = "examples/digits"

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
