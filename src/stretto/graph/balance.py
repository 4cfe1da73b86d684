"""Where stages begin, so that the longest takes as little time as it can. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from stretto.errors import Refused

CANDIDATES: Final = 256  # places that are looked at; the search takes the square of it
BYTES_PER_SECOND: Final = 1e9  # of what passes between stages, as a cost of the stage that sends it


def balanced(
    costs: Sequence[float], edges: Sequence[int], crossing: Sequence[int], count: int, already: Sequence[float] = ()
) -> tuple[int, ...]:
    """The places at which stages after the first begin: among ``edges``, rising, ``count - 1`` of them.

    Args:
        costs: seconds of each operation, forward and backward.
        edges: the places where a stage may begin.
        crossing: of each place, the bytes that pass it.
        count: how many stages.
        already: seconds of each stage that it has to do beside these operations.

    Raises:
        Refused: there are not so many places.
    """
    if len(edges) < count - 1:
        raise Refused(
            f"plan: {count} stages are asked for, and the model can be cut into {len(edges) + 1}; use fewer (pp times "
            "chunks)"
        )
    before = [0.0, *accumulate(costs)]
    places = [0, *_narrow(edges, before, crossing, count), len(costs)]
    passing = [0.0, *(crossing[place] / BYTES_PER_SECOND for place in places[1:-1]), 0.0]
    beside = already or [0.0] * count
    # longest[k][j]: the least that the longest of k + 1 stages takes, of which the last ends at places[j]
    longest = [[before[place] + passing[at] + beside[0] for at, place in enumerate(places)]]
    choice: list[list[int]] = []
    for stages in range(1, count):
        row, chosen = [float("inf")] * len(places), [0] * len(places)
        for end in range(stages + 1, len(places)):
            for start in range(stages, end):
                stage = before[places[end]] - before[places[start]] + passing[end] + beside[stages]
                worst = max(longest[-1][start], stage)
                if worst < row[end]:
                    row[end], chosen[end] = worst, start
        longest.append(row)
        choice.append(chosen)
    found, at = [], len(places) - 1
    for chosen in reversed(choice):
        at = chosen[at]
        found.append(places[at])
    return tuple(reversed(found))


def _narrow(edges: Sequence[int], before: Sequence[float], crossing: Sequence[int], count: int) -> list[int]:
    """Of many places those that least passes, spread over the whole."""
    room = max(CANDIDATES, 2 * count)
    if len(edges) <= room:
        return list(edges)
    found: dict[int, int] = {}
    for place in edges:
        part = min(room - 1, int(before[place] / (before[-1] or 1.0) * room))
        if part not in found or crossing[place] < crossing[found[part]]:
            found[part] = place
    return sorted(found.values()) if len(found) >= count - 1 else list(edges)
