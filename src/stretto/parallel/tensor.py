"""``tp``: each layer cut over ranks that have the same samples (Megatron-LM, arXiv 1909.08053, section 3).

Which layers are cut, and how, comes from the traced graph (:mod:`stretto.graph.cut`), whatever the modules are called
and however they view their tensors. What runs is that graph on a rank's parts: the model's own operations in their own
order. Python that forward runs beside them runs once, when it is traced: for each mode (training or not) and each shape
of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx, nn

from stretto.comm.members import Members
from stretto.data import mapped
from stretto.errors import Refused
from stretto.graph.cut import Cut, follow_cut, plan_cut, report
from stretto.graph.localize import DROP, ENTER, LEAVE, Localizer
from stretto.graph.rules import read
from stretto.graph.trace import Traced, filled, tensors_in, trace
from stretto.parallel._base import Manner, Place, Ranks
from stretto.parallel.copies import narrowed, sparse_parameters, trained
from stretto.parallel.layout import Placed
from stretto.parallel.template import Template
from stretto.state import Part, assign_owners

_NOTHING: Final = torch.empty(0)


class Tensor(Placed):
    """A rank's part of every layer.

    Raises:
        Refused: the model can't be traced, or nothing of it can be cut.
    """

    def __init__(self, template: Template, ranks: Ranks, manner: Manner) -> None:
        self.reduces_once = manner.reduce_once
        types = narrowed(template, manner.compute)
        super().__init__(template.build(ranks.world.device, types), ranks, manner)
        self._whole = template.build(ranks.world.device, types)  # never written, so it takes no memory
        self._programs: dict[Any, _Program] = {}
        assert manner.example is not None
        with manner.surround():
            traced = trace(self._whole.train(), *manner.example)
        cut = plan_cut(read(traced), traced, ranks.tensor.size)
        if not cut.axes:
            why = next(iter(report(cut, traced).items()), ("", ""))
            raise Refused(f"plan: tp={ranks.tensor.size} finds nothing to cut in this model; {why[0]}: {why[1]}")
        self._parts = _parts(cut, traced, ranks.tensor.rank)
        _replace(self.module, self._parts)
        self._places = self._offloaded.places(self._settle(template))
        self._frozen = {name: p.compute for name, p in self._places.items() if not template.trainable[name]}
        self._programs[_key(True, *manner.example)] = self._program(traced, cut)
        self.module.forward = self._forward(self.module.forward)

    def _settle(self, template: Template) -> dict[str, Place]:
        """What tp cuts has an owner among the ranks of one part; the rest among all."""
        world, everyone = self.ranks.world, self.ranks.everyone
        cut = {name for name, part in self._parts.items() if part.cut}
        inside = assign_owners((spec for name, spec in template.specs.items() if name in cut), world.size)
        outside = assign_owners((spec for name, spec in template.specs.items() if name not in cut), everyone.size)
        sparse = sparse_parameters(self.module)
        found = {}
        for name, parameter in self.module.named_parameters():
            spec = template.specs[name]
            owner = inside[name] == world.rank if name in cut else outside[name] == everyone.rank
            local = trained(spec, parameter)
            found[name] = Place(spec, self._parts[name], local, parameter, owner=owner, sparse=name in sparse)
        return found

    # ---- running

    def _forward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            key = _key(self.module.training, arguments, keywords)
            if key not in self._programs:
                self._programs[key] = self._another(arguments, keywords)
            return self._programs[key].run(self.module, arguments, keywords)

        return forward

    def _another(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Program:
        """For another mode or other shapes: the same cut of the same parameters."""
        with torch.enable_grad():  # in the precision that surrounds every forward
            traced = trace(self._whole.train(self.module.training), arguments, keywords)
        cut = follow_cut(read(traced), traced, self._parts, self.ranks.tensor.size)
        return self._program(traced, cut)

    def _program(self, traced: Traced, cut: Cut) -> _Program:
        tensor = self.ranks.tensor
        modules = {ENTER: _Enter(tensor), LEAVE: _Leave(tensor), DROP: _Drop()}
        return _Program(traced, Localizer(traced, cut, tensor.rank).build(modules))

    # ---- the contract

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`."""
        return True

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; gradients are left to the sync rule."""
        yield
        self._check()

    def teardown(self) -> None:
        """See :class:`Applied`."""
        super().teardown()
        self._programs = {}
        del self._whole


@dataclass(frozen=True)
class _Program:
    """One traced graph of one rank."""

    traced: Traced
    graph: fx.GraphModule

    def run(self, module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What forward of ``module``, which holds this rank's parts, gives."""
        traced = self.traced
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        named = {**traced.parameters, **traced.buffers}
        given = dict(zip(traced.arguments, tensors_in((arguments, dict(keywords))), strict=True))
        values = []
        for node in traced.graph.graph.nodes:
            if node.op == "placeholder":
                name = node.name
                values.append(
                    tensors[named[name]] if name in named else given[name] if name in given else traced.constants[name]
                )
        found = self.graph(*values)
        with torch.no_grad():
            for name, value in zip(traced.mutated, found, strict=False):
                tensors[name].copy_(value)
        return filled(traced.output, found[len(traced.mutated) :])


def _key(training: bool, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What a trace holds for: the mode, the shapes, and every number that isn't in a tensor."""
    given = (arguments, dict(keywords))
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given))
    return training, shapes, repr(mapped(given, lambda _: _NOTHING))


def _parts(cut: Cut, traced: Traced, rank: int) -> dict[str, Part]:
    nodes = {traced.parameters[n.name]: n for n in traced.graph.graph.nodes if n.name in traced.parameters}
    return {name: cut.part(cut.reading.of(node), rank) for name, node in nodes.items()}


def _replace(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Gives the module parameters of a rank's shapes, tied ones still tied."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        empty = torch.empty(parts[name].shape, dtype=parameter.dtype, device=parameter.device)
        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for owner in module.modules():
        for key, whole in owner._parameters.items():
            if whole is not None:
                owner._parameters[key] = made[id(whole)]


# ---- messages inside the graph


class _Enter(nn.Module):
    """The same on all ranks; each uses it for its own part, so its gradient is the sum of theirs."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return cast(torch.Tensor, _EnterFunction.apply(x, self._members))  # type: ignore[no-untyped-call]


class _EnterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.members.all_reduce(total)
        return total, None


class _Leave(nn.Module):
    """Each rank's sum over its part, added up; the gradient of the sum is that of each."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``."""
        return cast(torch.Tensor, _LeaveFunction.apply(x, self._members))  # type: ignore[no-untyped-call]


class _LeaveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        members.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Drop(nn.Module):
    """Dropout of a part: all ranks draw for the whole tensor, as one device does, and each uses its piece."""

    def forward(
        self, x: torch.Tensor, rate: float, shape: list[int], dim: int, pieces: list[tuple[int, int]]
    ) -> torch.Tensor:
        """``x`` with elements at zero, the others larger."""
        keep = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - rate).div_(1 - rate)
        return x * torch.cat([keep.narrow(dim, first, last - first) for first, last in pieces], dim)
