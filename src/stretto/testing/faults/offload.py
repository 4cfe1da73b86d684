"""What lies on the host and comes back late, or as something else."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from stretto.testing.faults.planting import FAULTY_STEP, note_batches


def weights_left_on_the_host(rank: int) -> None:
    """At the faulty step forward's weights are not filled from those that were updated on the host."""
    from stretto.parallel import copies, layout

    honest, seen = copies.copy_down, list[tuple[int, ...]]()
    note_batches(seen)

    def copy_down(places: Iterable[Any]) -> None:
        if len(seen) != FAULTY_STEP:
            honest(places)

    vars(layout)["copy_down"] = copy_down


def memory_taken_for_another(rank: int) -> None:
    """At the faulty step memory is known by its size alone, so that one tensor comes back as another."""
    from stretto.parallel import offload

    honest, seen = offload.Mover._storage, list[tuple[int, ...]]()
    note_batches(seen)

    def storage(self: Any, tensor: Any, held: Any) -> Any:
        found = honest(self, tensor, held)
        if len(seen) != FAULTY_STEP:
            return found
        size = -held.untyped_storage().nbytes()  # no id is negative
        known = self._moved[size]() if size in self._moved else None
        self._moved[size] = weakref.ref(known or found)
        return known or found

    offload.Mover._storage = storage  # type: ignore[method-assign]
