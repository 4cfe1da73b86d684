"""Parameters that every rank has whole in the module: their places, and copies in a lower precision.

In bf16 and fp16 forward computes with copies; what is trained, saved and compared are the float32 parameters (arXiv
1710.03740, section 3.1). The copies are made anew after each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.parallel._base import Holders, Place
from stretto.parallel.batchnorm import widen_norms
from stretto.parallel.template import Template
from stretto.state import Box, Part, Shares, TensorSpec


def narrowed(template: Template, compute: torch.dtype) -> dict[str, torch.dtype]:
    """The parameters of which forward uses copies, with the copies' type."""
    if compute == torch.float32:
        return {}
    return {name: compute for name, spec in template.specs.items() if spec.dtype == "float32"}


def blank_model(template: Template, device: torch.device, types: Mapping[str, torch.dtype]) -> nn.Module:
    """The model as it is traced: parameters in the types that forward has them in, and no values."""
    module = template.build(device, types)
    return widen_norms(module) if types else module


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters whose gradients are sparse: tables of embeddings that ask for it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tables = (child for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag))
    return {names[id(table.weight)] for table in tables if table.sparse}


def whole_part(spec: TensorSpec) -> Part:
    """All of it."""
    return Part((Box.whole(spec.shape),))


def whole_place(spec: TensorSpec, compute: nn.Parameter, owner: bool, world: Members, sparse: bool = False) -> Place:
    """A parameter that every rank of ``world`` updates, all of it."""
    part, local = whole_part(spec), trained(spec, compute)
    return Place(spec, part, local, compute, Holders(world, world, owner), sparse=sparse)


def dealt_place(
    spec: TensorSpec, part: Part, compute: nn.Parameter, shares: Shares, adds: Members, alike: Members,
    copies: Members | None = None,
) -> Place:  # fmt: skip
    """A parameter of which each rank of ``adds`` updates a share of the part that lies here, as it was dealt.

    Args:
        shares: within the part.
        alike: those that have the same share.
        copies: those of them that add to its gradient.
    """
    rank = adds.rank
    holders = [holder for holder, box in enumerate(shares) if box.numel] or [0]
    share, whole = shares[rank], Box.whole(tuple(compute.shape))
    mine = nn.Parameter(compute.detach()[share.within(whole)], compute.requires_grad)
    held = Holders(adds, alike, rank in holders and alike.rank == 0, copies)
    own = part.rows(share.starts[0], share.stops[0])
    return Place(spec, own, trained(spec, mine), compute, held, shares=shares)


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
