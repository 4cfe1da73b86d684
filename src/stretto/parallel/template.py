"""The plain template: the user's module, really built once, from which every layout is copied.

Building on the meta device would lose what constructors compute (scaled initialisation, rotary tables), so ``model()``
runs for real. A layout then needs the module's *structure* with fresh memory, and the *values* only slice by slice: the
copy is made with empty tensors in place of all parameters and buffers, which are filled by ``import_state``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import TaskError, one_line
from stretto.layout import Layout
from stretto.state import MemorySource, TensorSpec
from stretto.task import Params


class Template:
    """A module's structure, and until :meth:`release` its first values.

    Args:
        module: built, on the CPU, in the type it trains in. The template takes it over.
        retyped: types that its parameters had before, where the precision changed them; each with a parameter's name.
        layout: what the task says of how it may be cut.

    Raises:
        TaskError: a parameter that was never given a shape (lazy modules), or that lies on another device.
    """

    def __init__(
        self, module: nn.Module, retyped: Mapping[str, str] | None = None, layout: Layout | None = None
    ) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise TaskError(f"task: {name} has no shape yet (a lazy module); run the model once inside model()")
            if tensor.is_meta:
                raise TaskError(f"task: {name} lies on the meta device; model() must build real weights")
        _refuse_captured(module)
        _refuse_hooked(module)
        self._module = module
        self.retyped = dict(retyped or {})
        self.layout = layout or Layout()
        self.specs: Mapping[str, TensorSpec] = {name: TensorSpec.of(name, p) for name, p in module.named_parameters()}
        self.trainable: Mapping[str, bool] = {name: p.requires_grad for name, p in module.named_parameters()}

    def trains_as_float(self, name: str) -> bool:
        """Whether a parameter is of a real or complex floating type; whole numbers can't be trained."""
        dtype: torch.dtype = getattr(torch, self.specs[name].dtype)
        return dtype.is_floating_point or dtype.is_complex

    @property
    def structure(self) -> nn.Module:
        """The module itself: to look at, not to change or call."""
        return self._module

    @property
    def initial(self) -> MemorySource:
        """The values that ``model()`` gave, as logical tensors named ``model/...``."""
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return MemorySource({f"model/{name}": tensor.detach() for name, tensor in tensors.items()})

    def build(self, device: torch.device, types: Mapping[str, torch.dtype] | None = None) -> nn.Module:
        """A copy of the module on ``device`` whose parameters and buffers are allocated but not filled.

        Args:
            types: parameters that get another type than their own, by name.

        Memory that is never written costs no pages, so a copy that is sharded right away never exists whole.

        Raises:
            TaskError: the module holds something that can't be copied.
        """
        memo: dict[int, Any] = {}
        for name, parameter in self._module.named_parameters():
            dtype = (types or {}).get(name, parameter.dtype)
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in self._module.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        try:
            return copy.deepcopy(self._module, memo)
        except (TypeError, RuntimeError) as error:
            raise TaskError(f"task: model() holds something that can't be copied: {one_line(error)}") from error

    def logical_params(self, device: torch.device) -> Params:
        """Stand-ins with every parameter's logical shape and one element of memory each, for an optimizer factory."""
        return Params(
            (
                name,
                nn.Parameter(
                    torch.zeros((), dtype=getattr(torch, spec.dtype), device=device).expand(spec.shape),
                    requires_grad=self.trainable[name],
                ),
            )
            for name, spec in self.specs.items()
        )

    def release(self) -> None:
        """Drops the values in this process and keeps the structure; :attr:`initial` is of no use afterwards."""
        replaced: dict[int, Any] = {}
        for module in self._module.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    module._parameters[key] = replaced.setdefault(id(parameter), meta)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = replaced.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))


def refuse_overlaps(module: nn.Module) -> None:
    """Raises TaskError where a parameter that trains lies in the memory of another parameter or a buffer without being
    the same: on one device an update of one would change the other; layouts give each memory of its own."""
    by_memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for together in by_memory.values():
        if len(together) > 1 and any(tensor.requires_grad for _, tensor in together):
            _refuse_common_elements(sorted(together, key=lambda each: not each[1].requires_grad))


def _refuse_common_elements(together: list[tuple[str, torch.Tensor]]) -> None:
    """Of tensors in one memory, those that train first. Columns of one matrix lie side by side, and are let through."""
    _, first = together[0]
    taken = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.bool)
    for name, tensor in together:
        if tensor.itemsize != first.itemsize:
            continue
        place = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if place.any():
            raise TaskError(
                f"task: {name} lies in the memory of a parameter that trains (a view of it, or its .data); laid out "
                "for a plan each would have memory of its own, and no longer change with the other. Use the very same "
                "Parameter in both places, compute one from the other in forward, or .clone() it"
            )
        if tensor.requires_grad:
            place.fill_(True)


def _refuse_captured(module: nn.Module) -> None:
    """Raises TaskError where a function kept in the model holds a part of the model in its closure.

    Layouts are copies, and Python copies a function with its closure as it is: it would go on using the template's
    parameter, which nobody trains.
    """
    parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    for name, owner in module.named_modules():
        for key, value in vars(owner).items():
            kept = value.values() if key.endswith("_hooks") and isinstance(value, dict) else (value,)
            for function in kept:
                cells = getattr(function, "__closure__", None) or ()
                if any(id(_content(cell)) in parts for cell in cells):
                    where = f"{name}.{key}" if name else key
                    raise TaskError(
                        f"task: the function in {where} holds a part of the model in its closure, which can't be "
                        "copied with it; make it a method, or pass the parameter as an argument"
                    )


def _refuse_hooked(module: nn.Module) -> None:
    """Raises TaskError where a parameter changes its gradient by a hook: copies don't have it, and parts of a gradient
    would be changed where one device changes their sum."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                f"task: {name} has a gradient hook, which would see parts of its gradient instead of their sum; change "
                "the loss, or let optimizer() return an optimizer that does it"
            )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
