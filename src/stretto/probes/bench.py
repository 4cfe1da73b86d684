"""Runs pieces of a batch through a task's functions in float64, each from the same state, and notes what came of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from stretto.data import derive_seed, fetch, seed_everything, to_device
from stretto.errors import TaskError
from stretto.precision import cast_model, computing
from stretto.probes.quiet import Watch
from stretto.probes.trees import tensors
from stretto.task import Task

CPU: Final = torch.device("cpu")
TRACE_BYTES: Final = 2**29

Pair = tuple[float, float]


class UsersError(Exception):
    """A function of the user's raised something; ``__cause__`` is it."""


@dataclass(frozen=True)
class Stage:
    """The tensors that one function or layer gave, by path."""

    name: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one piece of the batch gave.

    Args:
        begin: place of its first sample in the batch.
        size: its samples.
        output: the tensors in the model's output.
        terms: (sum, weight) of the loss, by name where it has several terms.
        metrics: (sum, weight) by name.
        buffers: after the forward, which began with the model's own.
        layers: the elements of the model's lists that were called, in order.
        stages: what each function and layer gave, in order of completion, where a trace was asked for.
        torch_drew: whether torch's global generator was used.
        host_drew: whether Python's or NumPy's was.
        coarsest: the largest machine epsilon of the types that were computed in.
    """

    begin: int
    size: int
    output: Mapping[str, Tensor]
    terms: Mapping[str, Pair]
    metrics: Mapping[str, Pair]
    buffers: Mapping[str, Tensor]
    layers: tuple[str, ...]
    stages: tuple[Stage, ...]
    torch_drew: bool
    host_drew: bool
    coarsest: float


class Bench:
    """The model, in float64 and training mode, and some samples. The model given is changed, and is of no other use.

    Args:
        ids: the samples of the batch.
    """

    def __init__(self, task: Task, model: nn.Module, dataset: Dataset[Any], ids: tuple[int, ...]) -> None:
        self.task, self.dataset, self.ids = task, dataset, ids
        self.model = cast_model(model, "fp64").train()
        self.still = False
        _wake(self.model)
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._before = self._marks()
        self._homes = _homes(self.model)
        self._norms = _Norms(self.model)
        self._layers: list[str] = []
        for name, layer in _listed(self.model):
            layer.register_forward_pre_hook(partial(_note, self._layers, name))

    def samples(self, begin: int, end: int) -> list[Any]:
        """The samples themselves, read under their keyed generators."""
        with _users():
            return list(fetch(self.dataset, self.ids[begin:end], list, self.task.recipe.seed, 0))

    def run(self, begin: int, end: int, *, traced: bool = False) -> Pass:
        """Runs the samples from place ``begin`` to ``end``. The whole batch must be run before any piece.

        Raises:
            TaskError: as the user's functions do.
            UsersError: they raised something else.
        """
        samples = self.samples(begin, end)
        self._restore()
        self._layers.clear()
        self._norms.begin(whole=end - begin == len(self.ids))
        key = derive_seed(self.task.recipe.seed, "probe")
        seed_everything(key)
        torch_before, host_before = torch.get_rng_state(), _host_state()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            watch = stack.enter_context(Watch(self.still))
            stages = stack.enter_context(_traced(self.model, traced))
            stack.enter_context(_users())
            batch = to_device(self.task.collate(samples), CPU, torch.float64)
            arguments, keywords = self.task.inputs(batch, self.model.forward)
            stages("collate()", batch)
            stages("inputs()", (arguments, keywords))
            with computing("fp64"):
                arguments, keywords = (to_device(each, CPU, torch.float64) for each in (arguments, keywords))
                watch.begin()
                output = self.model(*arguments, **keywords)
                terms = _terms(self.task.losses(output, batch))
                metrics = self._metrics(output, batch)
        return Pass(
            begin=begin,
            size=end - begin,
            output=tensors(output),
            terms=terms,
            metrics=metrics,
            buffers={name: buffer.clone() for name, buffer in self.model.named_buffers()},
            layers=tuple(self._layers),
            stages=tuple(stages.found),
            torch_drew=not torch.equal(torch_before, torch.get_rng_state()),
            host_drew=host_before != _host_state(),
            coarsest=watch.coarsest,
        )

    def _metrics(self, output: Any, batch: Any) -> dict[str, Pair]:
        """Empty where they can't be computed on training samples: that is for evaluation to say."""
        try:
            found = self.task.metrics(output, batch).items()
            return {name: _floats(pair) for name, pair in found if isinstance(pair, tuple)}
        except Exception:
            return {}

    def written(self) -> str:
        """A parameter that the runs so far have changed, or nothing."""
        return next((name for name, mark in self._marks().items() if mark != self._before[name]), "")

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Of each parameter where it lies, and the sum of its bits, which costs no memory."""
        found = {}
        for name, parameter in self.model.named_parameters():
            flat = parameter.detach().reshape(-1)
            bits = flat.view(torch.int64) if flat.is_floating_point() or flat.is_complex() else flat.long()
            found[name] = (parameter.data_ptr(), int(bits.sum()))
        return found

    def _restore(self) -> None:
        for name, (owner, key) in self._homes.items():
            owner._buffers[key] = self.buffers[name].clone()


def runs_in_its_own_types(task: Task, model: nn.Module, dataset: Dataset[Any]) -> bool:
    """Whether a sample goes through the task as the recipe has it: then only the probe's float64 is in its way."""
    if task.recipe.precision == "fp64":
        return False
    try:
        batch = fetch(dataset, (0,), task.collate, task.recipe.seed, 0)
        arguments, keywords = task.inputs(batch, model.forward)
        model = cast_model(model, "fp32")
        with torch.no_grad():
            task.losses(model(*arguments, **keywords), batch)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _users() -> Iterator[None]:
    """What the user's functions raise inside, as a TaskError or a UsersError."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        raise UsersError from error


@torch.no_grad()
def _wake(model: nn.Module) -> None:
    """Gives trainable parameters that are zero throughout some values: a branch behind a gate that begins at zero
    changes nothing yet, and would pass for harmless."""
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.any():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64))


def _homes(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each buffer stands."""
    names = {name for name, _ in model.named_buffers()}
    found = {}
    for prefix, owner in model.named_modules():
        for key in owner._buffers:
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                found[name] = (owner, key)
    return found


def _listed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost elements of the model's lists that have parameters: its repeated layers."""
    inside: list[str] = []
    for name, holder in model.named_modules():
        if isinstance(holder, nn.ModuleList) and not any(f"{name}.".startswith(f"{above}.") for above in inside):
            for key, element in holder.named_children():
                if next(element.parameters(), None) is not None:
                    inside.append(f"{name}.{key}" if name else key)
                    yield inside[-1], element


def _note(names: list[str], name: str, module: nn.Module, _: Any) -> None:
    names.append(name)


def _terms(losses: Mapping[str, Any]) -> dict[str, Pair]:
    """The terms by name; a loss of one term has no name."""
    if losses.keys() == {"loss"}:
        return {"": _floats(losses["loss"])}
    return {name: _floats(pair) for name, pair in losses.items()}


def _floats(pair: Any) -> Pair:
    total, weight = (float(torch.as_tensor(part).double().sum()) for part in pair)
    return total, weight


def _host_state() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, numpy.asarray(keys).tobytes(), *rest


class _Stages:
    """Takes down what functions and layers give, up to a limit of memory."""

    def __init__(self, room_bytes: int) -> None:
        self.found: list[Stage] = []
        self._room = room_bytes

    def __call__(self, name: str, tree: Any) -> None:
        kept = tensors(tree)
        self._room -= sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        if self._room >= 0:
            # Cloned, as what follows may work in place.
            self.found.append(Stage(name, {path: tensor.detach().clone() for path, tensor in kept.items()}))


@contextlib.contextmanager
def _traced(model: nn.Module, wanted: bool) -> Iterator[_Stages]:
    stages = _Stages(TRACE_BYTES if wanted else -1)
    handles = []
    for name, module in model.named_modules() if wanted else ():
        where = f"model(): layer {name} ({type(module).__name__})" if name else "model(): forward"
        handles.append(module.register_forward_hook(lambda _m, _i, output, where=where: stages(where, output)))
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


class _Norms:
    """BatchNorm, whose statistics the engine takes from the whole global batch, whatever the cut: here pieces get those
    that the whole batch had. Running statistics stay as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._whole = True
        self._known: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._calls: dict[int, int] = {}
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.forward = partial(self._forward, module)  # type: ignore[method-assign]

    def begin(self, whole: bool) -> None:
        """A pass over the whole batch, or over a piece of it, begins."""
        self._whole = whole
        self._calls.clear()
        if whole:
            self._known.clear()

    def _forward(self, module: _BatchNorm, x: Tensor) -> Tensor:
        mean, variance = module.running_mean, module.running_var
        if module.training or mean is None:
            mean, variance = self._statistics(id(module), x)
        return F.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)

    def _statistics(self, key: int, x: Tensor) -> tuple[Tensor, Tensor]:
        known, call = self._known.setdefault(key, []), self._calls.get(key, 0)
        self._calls[key] = call + 1
        if self._whole or call >= len(known):
            variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
            known.append((mean, variance))
        return known[call] if call < len(known) else known[-1]
