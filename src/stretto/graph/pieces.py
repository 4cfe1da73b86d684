"""Where a stretch of a graph is cut into pieces that backward computes again, one at a time.

Of a piece only what comes into it is kept until backward, and while its own backward runs, all that it makes. So places
are looked for that little passes, close enough to one another: for a chain of equal operations the square root of its
length apart (Chen et al., arXiv 1604.06174, section 4), for a model of layers between them, whatever they are called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from torch import fx

from stretto.graph.effects import base_of

PIECE_BYTES: Final = 2**15
"""What a piece keeps beside its inputs: the states of the random generators as it met them."""


def weighed(
    nodes: Sequence[fx.Node], num_bytes: Callable[[fx.Node], int], source: Callable[[fx.Node], fx.Node | None]
) -> tuple[list[int], list[int]]:
    """Of each operation the bytes that it makes, and the bytes that pass the place before it: made earlier and used
    there or later.

    Args:
        num_bytes: of a result.
        source: the value that an operation hands on as it is, beside torch's own views; None where it makes one.
    """

    def base(node: fx.Node) -> fx.Node:
        while (one := source(found := base_of(node))) is not None:
            node = one
        return found

    place = {node: at for at, node in enumerate(nodes)}
    made, last = [0] * len(nodes), dict.fromkeys(place, 0)
    for node, at in place.items():
        if base(node) is node:
            made[at] = num_bytes(node)
        for one in node.all_input_nodes:
            if (of := base(one)) in place:
                last[of] = max(last[of], at)
    steps = [0] * (len(nodes) + 1)
    for node, at in place.items():
        if last[node] > at:
            steps[at + 1] += made[at]
            steps[last[node] + 1] -= made[at]
    passing, now = [], 0
    for step in steps[: len(nodes)]:
        now += step
        passing.append(now)
    return made, passing


def piece_starts(made: Sequence[int], passing: Sequence[int], edges: Sequence[int], ahead: int) -> list[int]:
    """The places of ``edges`` at which the pieces after the first begin, so that the least memory is needed.

    Args:
        ahead: how many times forward has run when backward begins, each with what it keeps of its own.
    """
    total, best, found = sum(made), float(sum(made)), list[int]()
    count = 2
    while count <= max(2, len(edges) + 1):
        starts = _cheapest(made, passing, edges, total // count)
        bounds = [0, *starts, len(made)]
        largest = max(sum(made[a:b]) for a, b in pairwise(bounds))
        needed = ahead * sum(passing[at] + PIECE_BYTES for at in starts) + largest
        if starts and needed < best:
            best, found = needed, starts
        count += max(1, count // 4)
    return found


def even_starts(weights: Sequence[int], edges: Sequence[int], least: int) -> list[int]:
    """The places of ``edges`` at which the pieces after the first begin, so that each but the last weighs ``least``."""
    found, here, before = [], 0, 0
    for edge in edges:
        here += sum(weights[before:edge])
        before = edge
        if here >= least and any(weights[edge:]):
            found.append(edge)
            here = 0
    return found


def _cheapest(made: Sequence[int], passing: Sequence[int], edges: Sequence[int], most: int) -> list[int]:
    """The cut past which the fewest bytes pass, of those into pieces that make at most ``most``, or can't be cut."""
    sums = [0]
    for one in made:
        sums.append(sums[-1] + one)
    places = [0, *edges, len(made)]
    costs, before = [0.0], [-1]
    window: deque[int] = deque([0])  # of the places that a piece may begin at, rising, those that a later one may beat
    for at in range(1, len(places)):
        while len(window) > 1 and sums[places[at]] - sums[places[window[0]]] > most:
            window.popleft()
        cost = costs[window[0]] + (passing[places[at]] + PIECE_BYTES if at < len(places) - 1 else 0)
        costs.append(cost)
        before.append(window[0])
        while window and costs[window[-1]] >= cost:
            window.pop()
        window.append(at)
    found, at = [], before[-1]
    while at > 0:
        found.append(places[at])
        at = before[at]
    return found[::-1]
