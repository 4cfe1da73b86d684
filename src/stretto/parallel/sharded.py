"""zero=3: parameters, gradients and optimizer state sharded over the group, by FSDP2 (ZeRO, arXiv 1910.02054, 5.3).

FSDP2 is asked for plain sums (a divide factor of 1): the engine divides once, by the global weight. Parameters without
dimensions, which it refuses, stay whole on each rank and their gradients are left to the sync rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from stretto.comm.group import Group
from stretto.errors import Refused
from stretto.parallel._base import Place
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.layout import buffer_slices, export_places, import_buffers, import_places
from stretto.parallel.template import Template
from stretto.state import Box, Slice, StateSource, TensorSpec, assign_owners


class Sharded:
    """The template with every parameter's first dimension dealt over the ranks of ``group``.

    Raises:
        Refused: parameters of several types, which FSDP2 can't flatten together.
    """

    def __init__(self, template: Template, group: Group) -> None:
        _refuse_mixed_types(template)
        _refuse_sparse(template)
        self.module = template.build(group.device)
        self._group = group
        self._norm = GlobalBatchNorm(self.module, group)
        mesh = DeviceMesh.from_group(group.process_group, group.device.type, mesh_dim_names=("dp_shard",))
        whole = {parameter for parameter in self.module.parameters() if not _can_cut(parameter.shape)}
        for unit in (*units(self.module), self.module):
            fully_shard(unit, mesh=mesh, ignored_params=whole)
        self._root = cast(FSDPModule, self.module)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no pre-multiplied sum
                if group.device.type == "cpu":
                    # Gathering the next unit early hides nothing where gathers block, and holds one unit more.
                    module.set_modules_to_backward_prefetch([module])
        self._watch = _Watch(self.module)
        self._dtensors = {name: p for name, p in self.module.named_parameters() if isinstance(p, DTensor)}
        owners = assign_owners((s for s in template.specs.values() if not _can_cut(s.shape)), group.size)
        parameters = dict(self.module.named_parameters())
        self._places = {
            name: self._place(parameters[name], spec, owners.get(name) == group.rank)
            for name, spec in template.specs.items()
        }

    def _place(self, parameter: nn.Parameter, spec: TensorSpec, owner: bool) -> Place:
        if not isinstance(parameter, DTensor):
            return Place(spec, Box.whole(spec.shape), parameter, owner=owner, lead=owner, summed=False)
        with torch.no_grad():
            local = parameter.to_local()
        chunk = -(-spec.shape[0] // self._group.size)  # torch.chunk's rule, which Shard(0) follows
        first = min(self._group.rank * chunk, spec.shape[0])
        starts = (first, *(0 for _ in spec.shape[1:]))
        box = Box(starts, (first + local.shape[0], *spec.shape[1:]))
        mine = nn.Parameter(local, parameter.requires_grad)
        return Place(spec, box, mine, owner=True, lead=self._group.rank == 0, summed=True)

    @property
    def places(self) -> Mapping[str, Place]:
        """See :class:`Applied`."""
        return self._places

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`."""
        return True

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; before the last microbatch gradients stay unsharded and are not sent."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._watch.counting = not ghost
        self._watch.fired.clear()
        with self._norm.counting(not ghost):
            yield

    def gradient(self, name: str) -> torch.Tensor | None:
        """See :class:`Applied`."""
        sharded = self._dtensors.get(name)
        if sharded is None:
            return self._places[name].local.grad
        return None if sharded.grad is None else cast(DTensor, sharded.grad)._local_tensor

    @property
    def mark(self) -> int:
        """See :class:`Applied`."""
        return self._watch.mark

    def reached(self, name: str) -> bool:
        """See :class:`Applied`."""
        return name in self._watch.reached

    def clear_gradients(self) -> None:
        """See :class:`Applied`."""
        self._watch.clear()
        for sharded in self._dtensors.values():
            sharded.grad = None

    def export_state(self) -> Iterator[Slice]:
        """See :class:`Applied`."""
        yield from export_places(self._places)
        yield from buffer_slices(self.module, self._group)

    def import_state(self, source: StateSource) -> None:
        """See :class:`Applied`."""
        import_places(self._places, source)
        import_buffers(self.module, source)

    def teardown(self) -> None:
        """See :class:`Applied`."""
        self._norm.remove()
        self._places = {}
        self._dtensors = {}
        del self._root
        del self.module


_MARKS: Final = 1_048_573  # a prime below 2**20


class _Watch:
    """Notes which sharded parameters a gradient reaches, and in which order units are gathered.

    FSDP2 must reduce a unit's parameters together on every rank, also those that this rank's samples didn't use; zeros
    are sent for them. Afterwards zeros don't tell whether a parameter took part at all, and one device would leave one
    that didn't alone. So each whole parameter is watched, from the first forward on, when FSDP2 has made it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.reached: set[str] = set()
        self.fired: set[str] = set()  # in this microbatch
        self.mark = 0
        self.counting = True
        for index, (unit, homes) in enumerate(_homes(module)):
            unit.register_forward_pre_hook(partial(self._follow, index))
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch >= 2.13
                unit.set_reduce_scatter_unused_params(True, recurse=False)
            handles: list[RemovableHandle] = []
            handles.append(unit.register_forward_pre_hook(partial(self._look, homes, handles)))

    def clear(self) -> None:
        """Begins anew."""
        self.reached.clear()
        self.mark = 0

    def _follow(self, index: int, unit: nn.Module, _: Any) -> None:
        self.mark = (self.mark * 31 + index + 1) % _MARKS

    def _look(self, homes: list[_Home], handles: list[RemovableHandle], unit: nn.Module, _: Any) -> None:
        """The unit is gathered for the first time: its whole parameters are there, and stay the same objects."""
        for home in homes:
            parameter = home.owner._parameters[home.key]
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, home.name))  # type: ignore[no-untyped-call]
        handles.pop().remove()

    def _note(self, name: str, _: torch.Tensor) -> None:
        if name in self.fired:  # FSDP2 has reduced the first part by now, and loses the second
            raise Refused(
                f"plan: the gradient of {name} comes in several parts within one backward, as a re-entrant checkpoint "
                "of a shared layer makes it, which zero=3 can't add up; use checkpoint(..., use_reentrant=False), or "
                "zero=0"
            )
        self.fired.add(name)
        if self.counting:
            self.reached.add(name)


@dataclass(frozen=True)
class _Home:
    """Where a sharded parameter stands: its name in the model, and the module and key that hold it."""

    name: str
    owner: nn.Module
    key: str


def _homes(module: nn.Module) -> list[tuple[Any, list[_Home]]]:
    """Each FSDP2 unit with the parameters that it gathers itself; a tied one under its first name."""
    seen: set[int] = set()
    unit_of: dict[str, nn.Module] = {}
    homes: dict[nn.Module, list[_Home]] = {}
    for prefix, owner in module.named_modules():
        is_unit = isinstance(owner, FSDPModule)
        unit_of[prefix] = owner if is_unit else unit_of[prefix.rpartition(".")[0]]
        own = homes.setdefault(unit_of[prefix], [])
        for key, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor) and id(parameter) not in seen:
                seen.add(id(parameter))
                own.append(_Home(f"{prefix}.{key}" if prefix else key, owner, key))
    return list(homes.items())


def units(module: nn.Module) -> list[nn.Module]:
    """The submodules to gather one at a time: the elements of the module's lists, which are its repeated layers.

    An element is left to the root where it isn't called as a module, has no parameters, shares a parameter with
    something outside it (a tied weight must be gathered with both users), or holds only scalars.
    """
    uses: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: list[nn.Module] = []
    for holder in module.modules():
        if isinstance(holder, nn.ModuleList):
            found += [child for child in holder if _is_unit(child, uses)]
    inside = {id(below) for unit in found for below in unit.modules() if below is not unit}
    return [unit for unit in dict.fromkeys(found) if id(unit) not in inside]


def _is_unit(module: nn.Module, uses: Mapping[int, int]) -> bool:
    if type(module).forward is nn.Module.forward:  # a container: its children are called, it never is
        return False
    own: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                own[id(parameter)] = own.get(id(parameter), 0) + 1
    if any(count != uses[key] for key, count in own.items()):
        return False
    return any(_can_cut(parameter.shape) for parameter in module.parameters())


def _can_cut(shape: Sequence[int]) -> bool:
    """Whether FSDP2 can deal a parameter: it takes none without dimensions or without elements."""
    return bool(shape) and math.prod(shape) > 0


def _refuse_sparse(template: Template) -> None:
    for name, module in template.structure.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Refused(f"plan: {name} makes sparse gradients, which zero=3 can't reduce; use zero=0 or sparse=False")


def _refuse_mixed_types(template: Template) -> None:
    types = {spec.dtype: name for name, spec in template.specs.items() if _can_cut(spec.shape)}
    if len(types) > 1:
        shown = ", ".join(f"{name} is {dtype}" for dtype, name in types.items())
        raise Refused(f"plan: zero=3 needs parameters of one type, but {shown}; use zero=0")
