"""From a traced graph to the axes that ``tp`` cuts, by what the task wishes and by what the graph allows."""

from __future__ import annotations

from stretto.errors import Refused
from stretto.graph.cut import Cut, plan_cut, report
from stretto.graph.reading import Reading
from stretto.graph.rules import read
from stretto.graph.trace import Traced
from stretto.graph.wishes import wishes_of
from stretto.parallel.template import Template


def cut_inside(traced: Traced, template: Template, degree: int) -> Cut:
    """The cut over ``degree`` ranks.

    Raises:
        Refused: nothing can be cut inside, though ``tp`` asks for it; or not as the task's ``layout()`` wants it.
    """
    if degree == 1:
        return uncut()
    wishes = wishes_of(template.layout, template.structure)
    cut = plan_cut(read(traced), traced, degree, wishes)
    if not cut.axes:
        whys = report(cut, traced).items()  # of a number there is nothing to say
        said = next((f"; {name}: {why}" for name, why in whys if not why.endswith(": ")), "")
        raise Refused(f"plan: tp={degree} finds nothing to cut in this model{said}")
    return cut


def uncut() -> Cut:
    """Everything whole."""
    return Cut(Reading(), frozenset(), 1)
