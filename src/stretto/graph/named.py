"""Stages and towers by the names that a task's ``layout()`` gives, where they shouldn't be found by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import fx

from stretto.errors import Refused, nearest
from stretto.graph.assignment import Assignment
from stretto.graph.effects import draws_in
from stretto.graph.lanes import Group
from stretto.graph.stages import Work, module_of


def named_cuts(work: Work, cuts: Sequence[str], num_ranks: int, count: int) -> Assignment:
    """Stages that begin with the modules ``cuts``.

    Raises:
        Refused: there are not ``count - 1`` of them, one is none of the model's, they are out of order, or no stage can
            begin there.
    """
    if len(cuts) != count - 1:
        raise Refused(
            f"plan: layout() names {len(cuts)} cuts ({', '.join(cuts)}), so {len(cuts) + 1} stages; the plan has "
            f"{count} (pp times chunks)"
        )
    starts: list[int] = []
    for name in cuts:
        place = next((at for at, node in enumerate(work.nodes) if _inside(module_of(node), name)), None)
        if place is None:
            raise Refused(f"plan: layout() cuts at {name!r}, where the model computes nothing{_nearest(work, name)}")
        if place not in work.edges:
            raise Refused(
                f"plan: layout() cuts at {name!r}, where no stage can begin: "
                + ("it is the first" if place == 0 else "what is computed there is changed in place, before or later")
            )
        if starts and place <= starts[-1]:
            raise Refused(f"plan: layout() cuts at {name!r} after {cuts[len(starts) - 1]!r}, which runs no earlier")
        starts.append(place)
    return Assignment.stretches(len(work.nodes), starts, num_ranks)


def named_towers(work: Work, towers: Sequence[Sequence[str]], degree: int) -> list[Group]:
    """Towers of the modules that ``towers`` names for each lane, and the rest before and after them.

    Raises:
        Refused: there are not ``degree`` of them, a pattern fits nothing, or a tower needs something of another.
    """
    if len(towers) != degree:
        raise Refused(f"plan: layout() names {len(towers)} towers, and the plan has branch={degree}")
    named = {node: _tower(node, towers) for node in work.nodes}
    for at, names in enumerate(towers):
        if at not in named.values():
            raise Refused(f"plan: layout() has {list(names)} as a tower, and no operation is theirs")
    own = _between(work, named)
    stem, join = 0, degree + 1
    of: list[int] = []
    place = {node: at for at, node in enumerate(work.nodes)}
    for node in work.nodes:
        before = {of[place[source]] for source in node.all_input_nodes if source in place}
        tower = own[node]
        if tower is not None:
            if before - {stem, tower + 1}:
                raise Refused(
                    f"plan: layout() has {module_of(node)} in the tower {list(towers[tower])}, and it needs what comes "
                    "of another tower"
                )
            of.append(tower + 1)
        else:
            of.append(join if before - {stem} else stem)
    for first, last in work.together:
        if len(set(of[first : last + 1])) > 1:
            raise Refused(f"plan: {module_of(work.nodes[last])} can't be parted as the towers of layout() want it")
    draws = [of[at] for at, node in enumerate(work.nodes) if draws_in(node)]
    if draws != sorted(draws):
        raise Refused(
            "plan: the towers of layout() draw random numbers by turns, or in another order than they are named in, so "
            "they would draw others than one device does; name them in the order in which forward calls them"
        )
    spans = list(pairwise([0, *work.edges, len(work.nodes)]))
    each = ((stage, tuple(span for span in spans if of[span[0]] == stage)) for stage in sorted(set(of)))
    return [Group(own, stage - 1 if stem < stage < join else None) for stage, own in each]


def _between(work: Work, named: dict[fx.Node, int | None]) -> dict[fx.Node, int | None]:
    """What functions between a tower's modules compute is its own too: all that comes of it alone and that it needs."""
    comes: dict[fx.Node, set[int]] = {}
    goes: dict[fx.Node, set[int]] = {}
    for node in work.nodes:
        comes[node] = _set(named[node]).union(*(comes.get(source, ()) for source in node.all_input_nodes))
    for node in reversed(work.nodes):
        goes[node] = _set(named[node]).union(*(goes.get(user, ()) for user in node.users))
    found = {}
    for node, own in named.items():
        both = comes[node] | goes[node]
        between = comes[node] and goes[node] and len(both) == 1
        found[node] = min(both) if own is None and between else own
    return found


def _set(own: int | None) -> set[int]:
    return set() if own is None else {own}


def _tower(node: fx.Node, towers: Sequence[Sequence[str]]) -> int | None:
    path = module_of(node)
    return next((at for at, names in enumerate(towers) if any(_inside(path, name) for name in names)), None)


def _inside(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _nearest(work: Work, name: str) -> str:
    return nearest(name, dict.fromkeys(map(module_of, work.nodes)))
