"""From a traced graph to the axes that ``tp`` cuts, by what the task wishes and by what the graph allows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from stretto.errors import Refused
from stretto.graph.cut import Cut, plan_cut, report
from stretto.graph.reading import Reading
from stretto.graph.rules import read, whole_output
from stretto.graph.trace import Traced
from stretto.graph.wishes import wishes_of
from stretto.parallel.layout import CutBuffers
from stretto.parallel.template import Template
from stretto.state import Box, Part, TensorSpec


def cut_inside(traced: Traced, template: Template, degree: int, unscored: str) -> Cut:
    """The cut over ``degree`` ranks; ``unscored``: why the loss isn't in the graph, where it isn't.

    Raises:
        Refused: nothing can be cut inside, though ``tp`` asks for it; or not as the task's ``layout()`` wants it.
    """
    if degree == 1:
        return uncut()
    wishes = wishes_of(template.layout, template.structure)
    cut = plan_cut(read(traced, whole_output(unscored)), traced, degree, wishes)
    if not cut.axes:
        whys = report(cut, traced).items()  # of a number there is nothing to say
        said = next((f"; {name}: {why}" for name, why in whys if not why.endswith(": ")), "")
        raise Refused(f"plan: tp={degree} finds nothing to cut in this model{said}")
    return cut


def uncut() -> Cut:
    """Everything whole."""
    return Cut(Reading(), frozenset(), 1)


def parts_of(cut: Cut, traced: Traced, template: Template, rank: int) -> dict[str, Part]:
    """Of each parameter what a rank holds."""
    whole = {name: Part((Box.whole(spec.shape),)) for name, spec in template.specs.items()}
    if not cut.axes:
        return whole
    nodes = {traced.parameters[n.name]: n for n in traced.graph.graph.nodes if n.name in traced.parameters}
    return {**whole, **{name: cut.part(cut.reading.of(node), rank) for name, node in nodes.items()}}


def buffer_parts_of(cut: Cut, traced: Traced, module: nn.Module, rank: int) -> CutBuffers:
    """Likewise of the buffers that are cut."""
    nodes = {traced.buffers[n.name]: n for n in traced.graph.graph.nodes if n.name in traced.buffers}
    parts = {name: cut.part(cut.reading.of(node), rank) for name, node in nodes.items()} if cut.axes else {}
    specs = {name: TensorSpec.of(name, buffer) for name, buffer in module.named_buffers()}
    return {name: (specs[name], part) for name, part in parts.items() if part.cut}


def give_parts(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Gives the module parameters and buffers of a rank's shapes, tied ones still tied; of other buffers it has all."""
    made: dict[int, nn.Parameter] = {}
    buffers = {
        id(buffer): torch.empty(parts[name].shape, dtype=buffer.dtype, device=buffer.device)
        for name, buffer in module.named_buffers()
        if name in parts
    }
    for name, parameter in module.named_parameters():
        if tuple(parameter.shape) == parts[name].shape:
            made[id(parameter)] = parameter
            continue
        empty = torch.empty(parts[name].shape, dtype=parameter.dtype, device=parameter.device)
        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for owner in module.modules():
        for key, whole in owner._parameters.items():
            if whole is not None:
                owner._parameters[key] = made[id(whole)]
        for key, one in owner._buffers.items():
            owner._buffers[key] = one if one is None else buffers.get(id(one), one)
