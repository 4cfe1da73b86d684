"""zero=3: parameters, gradients and optimizer state sharded over the group, by FSDP2 (ZeRO, arXiv 1910.02054, 5.3).

It is for ranks that share no memory: those of one host hold one copy of the weights instead (:mod:`.whole`).
FSDP2 is asked for plain sums (a divide factor of 1): the engine divides once, by the global weight. It cuts parameters
of one type; those of another, without dimensions or elements, or with sparse gradients stay whole on each rank, and
their gradients are left to the sync rule. With fewer shards than ranks (hybrid) the sync rule also adds over the
replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from stretto.errors import Refused
from stretto.parallel._base import Holders, Manner, Place, Ranks
from stretto.parallel.copies import narrowed, sparse_parameters, whole_place
from stretto.parallel.layout import Placed, check_frozen
from stretto.parallel.template import Template
from stretto.parallel.units import units
from stretto.state import Part, TensorSpec, assign_owners
from stretto.state.shares import cut_rows


class Sharded(Placed):
    """The template with every parameter's first dimension dealt over the ranks that cut it."""

    def __init__(self, template: Template, ranks: Ranks, manner: Manner) -> None:
        self._manner = manner
        # FSDP2 can't keep those of copies that only some microbatches use
        self.reduces_once = manner.reduce_once and manner.compute == torch.float32
        kept_whole = _kept_whole(template)
        types = {name: dtype for name, dtype in narrowed(template, manner.compute).items() if name in kept_whole}
        super().__init__(template.build(ranks.world.device, types), ranks, manner)
        whole = {parameter for name, parameter in self.module.named_parameters() if name in kept_whole}
        self._root = self._shard(whole)
        self._watch = _Watch(self.module)
        self._dtensors = {name: p for name, p in self.module.named_parameters() if isinstance(p, DTensor)}
        owners = assign_owners((template.specs[name] for name in kept_whole), ranks.world.size)
        sparse = sparse_parameters(self.module)
        parameters = dict(self.module.named_parameters())
        places = {
            name: whole_place(spec, parameters[name], owners[name] == ranks.world.rank, ranks.world, name in sparse)
            if name in owners
            else self._place(self._dtensors[name], spec)
            for name, spec in template.specs.items()
        }
        self._places = self._offloaded.places(places)
        self._frozen = {name: parameters[name] for name in owners if not template.trainable[name]}

    def _shard(self, whole: set[nn.Parameter]) -> FSDPModule:
        device = self.ranks.world.device.type
        mesh = DeviceMesh.from_group(self.ranks.shards.process_group, device, mesh_dim_names=("dp_shard",))
        policy = MixedPrecisionPolicy()
        if self._manner.compute != torch.float32:
            policy = MixedPrecisionPolicy(self._manner.compute, torch.float32, cast_forward_inputs=False)
        for unit in (*units(self.module, whole), self.module):
            fully_shard(unit, mesh=mesh, ignored_params=whole, mp_policy=policy)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no pre-multiplied sum
                if device == "cpu":
                    # Gathering the next unit early hides nothing where gathers block, and holds one unit more.
                    module.set_modules_to_backward_prefetch([module])
        return cast(FSDPModule, self.module)

    def _place(self, parameter: DTensor, spec: TensorSpec) -> Place:
        with torch.no_grad():
            local = parameter.to_local()
        box = cut_rows(spec.shape, self.ranks.shards.size)[self.ranks.shards.rank]
        owner = self.ranks.replicas.rank == 0
        mine = nn.Parameter(local, parameter.requires_grad)
        compute, world = cast(nn.Parameter, parameter), self.ranks.world
        return Place(spec, Part((box,)), mine, compute, Holders(world, world, owner), summed=True)

    @property
    def communicates(self) -> bool:
        """See :class:`Applied`."""
        return True

    @contextmanager
    def microbatch(self, last: bool, ghost: bool) -> Iterator[None]:
        """See :class:`Applied`; where gradients are reduced once, they stay unsharded until the last microbatch."""
        self._root.set_requires_gradient_sync(last or not self.reduces_once)
        self._root.set_is_last_backward(last)
        self._watch.counting = not ghost
        self._watch.fired.clear()
        with self._norm.counting(not ghost):
            yield
        self._check()

    def gradient(self, name: str) -> torch.Tensor | None:
        """See :class:`Applied`."""
        sharded = self._dtensors.get(name)
        if sharded is None:
            return self._places[name].compute.grad
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

    def teardown(self) -> None:
        """See :class:`Applied`."""
        super().teardown()
        self._dtensors = {}
        del self._root


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
            if frozen := [home for home in homes if not home.trains]:
                # Before FSDP2's own hook, which puts the shards back: they don't know what befell the whole parameter.
                unit.register_forward_hook(partial(_check_frozen, frozen), prepend=True)
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
    """Where a sharded parameter stands: its name in the model, the module and key that hold it; whether it trains."""

    name: str
    owner: nn.Module
    key: str
    trains: bool


def _check_frozen(homes: list[_Home], unit: nn.Module, *_: Any) -> None:
    check_frozen({home.name: cast(nn.Parameter, home.owner._parameters[home.key]) for home in homes})


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
                own.append(_Home(f"{prefix}.{key}" if prefix else key, owner, key, parameter.requires_grad))
    return list(homes.items())


def _kept_whole(template: Template) -> set[str]:
    """The parameters that FSDP2 can't cut, or can't cut together with the others."""
    sparse = sparse_parameters(template.structure)
    weight: Counter[str] = Counter()
    able = {name: spec for name, spec in template.specs.items() if math.prod(spec.shape) and spec.shape}
    able = {name: spec for name, spec in able.items() if name not in sparse and template.trains_as_float(name)}
    for spec in able.values():
        weight[spec.dtype] += spec.num_bytes
    main = max(weight, key=lambda dtype: weight[dtype], default="")
    return {name for name in template.specs if name not in able or able[name].dtype != main}
