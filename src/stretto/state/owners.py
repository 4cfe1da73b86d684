"""Who answers for tensors that every member holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from stretto.state.logical import TensorSpec


def assign_owners(specs: Iterable[TensorSpec], num_holders: int) -> dict[str, int]:
    """One holder (0 .. num_holders - 1) for each name, balanced by bytes; the same answer on every member.

    The largest tensor goes first, each to the holder with the fewest bytes so far (Graham 1969, "Bounds on
    multiprocessing timing anomalies": at most 4/3 of the best balance). Ties go by name and by lowest holder.

    Raises:
        ValueError: no holder, or a name given twice.
    """
    if num_holders < 1:
        raise ValueError(f"expected at least one holder, got {num_holders}")
    loads = [(0, holder) for holder in range(num_holders)]
    owners: dict[str, int] = {}
    for spec in sorted(specs, key=lambda s: (-s.num_bytes, s.name)):
        if spec.name in owners:
            raise ValueError(f"the tensor {spec.name!r} is listed twice")
        load, holder = heapq.heappop(loads)
        owners[spec.name] = holder
        heapq.heappush(loads, (load + spec.num_bytes, holder))
    return owners
