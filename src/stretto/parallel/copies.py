"""Parameters that every rank has whole in the module: their places, and copies in a lower precision.

In bf16 and fp16 forward computes with copies; what is trained, saved and compared are the float32 parameters (arXiv
1710.03740, section 3.1). The copies are made anew after each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from stretto.parallel._base import Place
from stretto.parallel.template import Template
from stretto.state import Box, Part, Shares, TensorSpec


def narrowed(template: Template, compute: torch.dtype) -> dict[str, torch.dtype]:
    """The parameters of which forward uses copies, with the copies' type."""
    if compute == torch.float32:
        return {}
    return {name: compute for name, spec in template.specs.items() if spec.dtype == "float32"}


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters whose gradients are sparse: tables of embeddings that ask for it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tables = (child for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag))
    return {names[id(table.weight)] for table in tables if table.sparse}


def whole_place(spec: TensorSpec, compute: nn.Parameter, owner: bool, sparse: bool = False) -> Place:
    """A parameter that every rank updates, all of it."""
    return Place(spec, Part((Box.whole(spec.shape),)), trained(spec, compute), compute, owner=owner, sparse=sparse)


def dealt_place(spec: TensorSpec, compute: nn.Parameter, shares: Shares, rank: int) -> Place:
    """A parameter of which each rank updates the part that it was dealt."""
    holders = [holder for holder, box in enumerate(shares) if box.numel] or [0]
    mine = nn.Parameter(compute.detach()[shares[rank].within(Box.whole(spec.shape))], compute.requires_grad)
    local = trained(spec, mine)
    return Place(spec, Part((shares[rank],)), local, compute, owner=rank in holders, shares=shares)


def trained(spec: TensorSpec, compute: nn.Parameter) -> nn.Parameter:
    """What an optimizer updates for ``compute``: itself, or a parameter of the logical type."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if compute.dtype == dtype:
        return compute
    return nn.Parameter(torch.empty_like(compute, dtype=dtype), compute.requires_grad)


@torch.no_grad()
def copy_down(places: Iterable[Place]) -> None:
    """Brings every copy up to date with this rank's part of its parameter."""
    for place in places:
        if (here := place.copied) is not None:
            here.copy_(place.local)


def lay_flat(parameters: Mapping[str, nn.Parameter], offsets: Mapping[str, int], flat: torch.Tensor) -> None:
    """Makes ``parameters`` views of ``flat`` memory, each at its offset; what they held is let go."""
    for name, parameter in parameters.items():
        parameter.data = flat[offsets[name] : offsets[name] + parameter.numel()].view(parameter.shape)
