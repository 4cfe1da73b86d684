"""The user's optimizer, bound to the parts of the parameters that lie on this rank.

The factory runs once on the full list of logical parameters, so its groups are those of one device whatever the plan;
then each parameter in a group is replaced by this rank's part of it. Every rank keeps every group, empty ones too.
State is kept by parameter *name*: an element-by-element optimizer's state is cut exactly like its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from stretto.errors import CheckpointError, Refused, TaskError
from stretto.parallel._base import Applied, Place
from stretto.parallel.offload import to_host
from stretto.parallel.template import Template
from stretto.state import Box, Slice, StateSource, TensorSpec
from stretto.state.dtypes import dtype_name
from stretto.task import Params

PREFIX: Final = "optimizer/main/"


class BoundOptimizer:
    """One optimizer over one layout.

    Raises:
        TaskError: the factory put something else than the given parameters into its groups.
        Refused: it keeps state whose shape doesn't follow the parameter, which a sharded layout would compute wrongly.
    """

    def __init__(
        self,
        factory: Callable[[Params], Optimizer],
        template: Template,
        applied: Applied,
    ) -> None:
        self._places = applied.places
        trained = (place.local.device for place in self._places.values() if place.local.requires_grad)
        device = next(trained, applied.ranks.world.device)
        logical = template.logical_params(device)
        names = {id(parameter): name for name, parameter in logical.named()}
        self.optimizer = factory(logical)
        self._names_by_group: list[list[str]] = []
        for group in self.optimizer.param_groups:
            strangers = [p for p in group["params"] if id(p) not in names]
            if strangers:
                raise TaskError(
                    "task: optimizer() uses parameters that are not among `params`; use only those it is given"
                )
            self._names_by_group.append([names[id(p)] for p in group["params"]])
        self._check_name_counts()
        self._check_offload(device, applied.ranks.world.device)
        eager = {names[id(p)]: dict(state) for p, state in self.optimizer.state.items() if id(p) in names}
        self.optimizer.state.clear()
        for group, members in zip(self.optimizer.param_groups, self._names_by_group, strict=True):
            group["params"] = [self._places[name].local for name in members]
        for name, state in eager.items():
            place = self._places[name]
            if place.absent:
                continue
            self.optimizer.state[place.local] = {key: _cut(value, place) for key, value in state.items()}
        self._memory = {name: place.local.detach() for name, place in self._places.items()}

    def _check_name_counts(self) -> None:
        listed = [name for members in self._names_by_group for name in members]
        if len(set(listed)) != len(listed):
            raise TaskError("task: optimizer() puts a parameter into two groups")

    def _check_offload(self, here: torch.device, device: torch.device) -> None:
        if here != device and any(group.get("capturable") for group in self.optimizer.param_groups):
            raise Refused(
                f"plan: offload: the optimizer is told capturable=True, which torch runs on {device.type} alone, and "
                "this plan updates on the host; leave capturable out, or offload=optimizer"
            )

    def step(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """One update of this rank's parts with the given gradients; no communication. Where no part lies here, there is
        nothing to update, and not every optimizer takes an empty one."""
        for name, gradient in gradients.items():
            place = self._places[name]
            place.local.grad = None if place.absent or gradient is None else to_host(gradient, place.local)
        self.optimizer.step()
        for name, place in self._places.items():
            place.local.grad = None  # else last step's gradients would lie beside the next one's
            memory = self._memory[name]
            if place.local.data_ptr() != memory.data_ptr():  # it says `p.data = ...`, and forward reads the old memory
                memory.copy_(place.local.detach())
                place.local.data = memory

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The groups as JSON: every value but the parameters, which are given by name."""
        found = []
        for group, members in zip(self.optimizer.param_groups, self._names_by_group, strict=True):
            values = {key: _plain(key, value) for key, value in group.items() if key != "params"}
            found.append({"names": members, "values": values})
        return found

    def load_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """The inverse of :meth:`hyperparameters`. Raises CheckpointError where the groups differ."""
        if [group["names"] for group in groups] != self._names_by_group:
            raise CheckpointError("checkpoint: its optimizer groups hold other parameters than the task's optimizer()")
        for group, record in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in record["values"].items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def export_state(self) -> Iterator[Slice]:
        """This rank's part of every state tensor, named ``optimizer/main/PARAMETER/KEY``."""
        for name, place in self._places.items():
            for key, value in self.optimizer.state.get(place.local, {}).items():
                if isinstance(value, torch.Tensor):
                    yield from _state_slices(f"{PREFIX}{name}/{key}", value, place)

    def scalars(self) -> dict[str, dict[str, Any]]:
        """State that is no tensor, by parameter and key; must be plain JSON."""
        found: dict[str, dict[str, Any]] = {}
        for name, place in self._places.items():
            for key, value in self.optimizer.state.get(place.local, {}).items():
                if not isinstance(value, torch.Tensor):
                    found.setdefault(name, {})[key] = _plain(key, value)
        return found

    def import_state(self, source: StateSource, scalars: Mapping[str, Mapping[str, Any]]) -> None:
        """Fills the state from ``source``, reading only this rank's parts."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for full in source.names():
            if not full.startswith(PREFIX):
                continue
            name, _, key = full.removeprefix(PREFIX).rpartition("/")
            place = self._places.get(name)
            if place is None:
                raise CheckpointError(f"checkpoint: it has optimizer state for {name!r}, which the model does not have")
            if place.absent:
                continue
            spec = source.spec(full)
            if spec.shape == place.spec.shape:
                value = place.gather(partial(source.read, full))
            else:
                value = source.read(full, Box.whole(spec.shape))
            # Torch keeps step counters on the host, whatever device the parameter is on.
            state.setdefault(place.local, {})[key] = value if key == "step" else value.to(place.local.device)
        for name, values in scalars.items():
            state.setdefault(self._places[name].local, {}).update(values)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)


def _state_slices(full: str, value: torch.Tensor, place: Place) -> Iterator[Slice]:
    dtype = dtype_name(value.dtype)
    if value.shape == place.local.shape:
        for box, where in place.pieces:
            yield Slice(TensorSpec(full, place.spec.shape, dtype), box, value[where], place.owner)
        return
    shape = tuple(value.shape)
    cut = tuple(place.local.shape) != place.spec.shape
    if cut and value.numel() > 1:
        raise Refused(
            f"plan: the optimizer keeps {full.removeprefix(PREFIX)} of shape {shape}, which doesn't follow its "
            f"parameter's, so sharding would change the numbers; use zero=0"
        )
    # A counter, the same on every rank: one of them answers for it.
    yield Slice(TensorSpec(full, shape, dtype), Box.whole(shape), value, place.lead)


def _cut(value: Any, place: Place) -> Any:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == place.spec.shape:
        part = place.gather(lambda box: value[box.within(Box.whole(place.spec.shape))]).to(place.local.device)
        return part.clone(memory_format=torch.contiguous_format)  # the stand-in it was made after has no strides
    return value


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TaskError(f"task: the optimizer's {key!r} is a {type(value).__name__}, which a checkpoint can't hold as JSON")
