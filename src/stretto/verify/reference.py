"""One device, in plain PyTorch: what every plan is measured against.

Nothing of the engine is used here but the words (task, precision) and the data (which samples, in which pieces, under
which random numbers): the model is the user's own, backward is autograd's, clipping and optimizer are torch's. The
batch is cut into as many pieces as the plan cuts it, so that random numbers drawn in forward are the same. A model with
BatchNorm gets the whole batch in one piece, since its statistics are those of the whole batch.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.data import (
    BatchHandle,
    Piece,
    Position,
    Sampler,
    cut,
    derive_seed,
    fetch,
    seed_everything,
    to_device,
)
from stretto.launch import WorkerContext
from stretto.precision import COMPUTE, LossScale, cast_model, computing, first_scale, widen
from stretto.task import Pair, Params, Task, load_task
from stretto.verify.compare import magnitude
from stretto.verify.facts import ReferenceRecord, ReferenceStep
from stretto.verify.tolerances import NAMES

RECORD: Final = "reference.json"
OPTIMIZER: Final = "optimizer/main/"


def run(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """A lone worker's entry: takes the steps, leaves the files in ``payload["folder"]``, returns the record as JSON."""
    task = load_task(payload["task"], payload["sets"])
    folder = Path(payload["folder"])
    record = Reference(task, payload["pieces"], folder).run(min(payload["steps"], task.recipe.steps))
    (folder / RECORD).write_text(json.dumps(record.to_json()), encoding="utf-8")
    return record.to_json()


class Reference:
    """One device's training.

    Args:
        pieces: into how many the global batch is cut.
        folder: gets ``step-K.safetensors``: K = 0 the initial weights, then after each step ``gradient/NAME`` (of the
            mean loss, before clipping), ``model/NAME`` and ``optimizer/main/NAME/KEY``.
    """

    def __init__(self, task: Task, pieces: int, folder: Path) -> None:
        self._task, self._pieces, self._folder = task, pieces, folder
        self._dtype = COMPUTE[task.recipe.precision]
        seed_everything(task.recipe.seed)
        self._model = cast_model(task.model(), task.recipe.precision)
        self._named = dict(self._model.named_parameters())
        self._scale = first_scale(task.recipe.precision) or LossScale(1.0)
        self._nominal = float(task.recipe.batch)  # in fp16 the sum of all losses would overflow what the mean doesn't
        self._masters: dict[str, nn.Parameter] = {}
        self._copies: dict[str, nn.Parameter] = {}
        if self._dtype.itemsize < 4:
            self._keep_masters()
        self._norms = tuple(n for n, module in self._model.named_modules() if isinstance(module, _BatchNorm))
        self._dataset = task.data()["train"]
        self._optimizer = task.optimizer(Params(self._named.items()))
        self._schedule = task.schedule(self._optimizer)
        self._random = False
        self._terms: tuple[str, ...] = ()

    def _keep_masters(self) -> None:
        """Float32 parameters for the optimizer; the model keeps copies of them in the type that it computes in."""
        for name, copy in self._named.items():
            if copy.dtype == torch.float32:
                self._copies[name], self._masters[name] = copy, nn.Parameter(copy.detach().clone(), copy.requires_grad)
                copy.data = copy.detach().to(self._dtype)
        for module in self._model.modules():
            if isinstance(module, _BatchNorm):
                module.forward = partial(_norm_in_float32, module)  # type: ignore[method-assign]
        self._named = {**self._named, **self._masters}

    def run(self, steps: int) -> ReferenceRecord:
        """Takes ``steps`` steps."""
        recipe = self._task.recipe
        initial = self._save(0, dict(_prefixed("model/", self._state())))
        batches = Sampler(len(self._dataset), recipe.batch, recipe.seed).batches(1, Position())  # type: ignore[arg-type]
        taken = tuple(self._step(batch) for batch in islice(batches, steps))
        return ReferenceRecord(
            dtype=NAMES[recipe.precision],
            batch=recipe.batch,
            batch_norms=self._norms,
            random=self._random,
            aliases=_aliases(self._model),
            scales=initial,
            steps=taken,
            terms=self._terms,
        )

    def _step(self, batch: BatchHandle) -> ReferenceStep:
        parts = cut(batch.ids, 1, self._pieces, 0)
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[str, list[float]] = {}
        used = [part for part in (cut(batch.ids, 1, 1, 0) if self._norms else parts) if not part.ghost]
        divisors = self._divisors(used, batch)
        for part in used:
            terms = self._forward(part.ids, part.first, batch)
            self._backward(terms, divisors)
            for name, (total, share) in terms.items():
                known = sums.setdefault(name, [0.0, 0.0])
                known[0] += float(total.detach().double())
                known[1] += float(share.double())
        self._terms = tuple(sums)
        weighs = any(weight for _, weight in sums.values())
        weight = next(iter(sums.values()))[1]
        gradients, norm = self._update(weighs, 1.0 if divisors else weight, self._factor(divisors))
        if self._schedule is not None:
            self._schedule.step()
        tensors = {
            **dict(_prefixed("gradient/", gradients.items())),
            **dict(_prefixed("model/", self._state())),
            **dict(_prefixed(OPTIMIZER, self._optimizer_state())),
        }
        return ReferenceStep(
            step=batch.step,
            loss=sum(total / share for total, share in sums.values() if share) if weighs else math.nan,
            norm=norm,
            weight=weight,
            pieces=tuple(() if part.ghost else part.ids for part in parts),
            scales=self._save(batch.step, tensors),
        )

    def _samples(self, ids: tuple[int, ...], batch: BatchHandle) -> Any:
        return fetch(self._dataset, ids, self._task.collate, self._task.recipe.seed, batch.start.epoch)

    def _divisors(self, parts: list[Piece], batch: BatchHandle) -> dict[str, float]:
        """The weight of each term over the whole batch, where the task says them; else nothing."""
        found: dict[str, float] = {}
        for part in parts:
            for name, weight in (self._task.weights(self._samples(part.ids, batch)) or {}).items():
                found[name] = found.get(name, 0.0) + weight
        return found

    def _forward(self, ids: tuple[int, ...], first: int, batch: BatchHandle) -> dict[str, Pair]:
        """The terms of the loss of one piece: sums of the losses, with their gradients, and sums of their weights."""
        recipe, cpu = self._task.recipe, torch.device("cpu")
        samples = self._samples(ids, batch)
        arguments, keywords = self._task.inputs(samples, self._model.forward)
        seed_everything(derive_seed(recipe.seed, "forward", batch.step, first))
        before = _generators()
        with computing(recipe.precision):
            output = self._model(*to_device(arguments, cpu, self._dtype), **to_device(keywords, cpu, self._dtype))
            terms = self._task.losses(widen(output) if self._masters else output, samples)
        self._random |= _generators() != before
        return terms

    def _backward(self, terms: dict[str, Pair], divisors: dict[str, float]) -> None:
        """Adds the gradients of one piece to the trained parameters."""
        parts = [total / divisors[name] if divisors else total for name, (total, _) in terms.items()
                 if not divisors or divisors[name]]  # fmt: skip
        if not parts:
            return
        (self._factor(divisors) * sum(parts[1:], parts[0])).backward()  # type: ignore[no-untyped-call]
        for name, master in self._masters.items():
            copy = self._copies[name]
            if copy.grad is not None:
                wide = copy.grad.to(master.dtype)
                master.grad = wide if master.grad is None else master.grad + wide
                copy.grad = None

    def _factor(self, divisors: dict[str, float]) -> float:
        """What the loss is multiplied with before backward, and its gradient divided by after it; a power of two."""
        return self._scale.scale / (1.0 if divisors else float(2.0 ** round(math.log2(self._nominal))))

    def _update(self, weighs: bool, weight: float, factor: float) -> tuple[dict[str, torch.Tensor], float]:
        """Divides, clips and applies. Returns the gradients of the mean loss and their norm, both before clipping;
        nothing is applied where there is no weight or the norm isn't finite."""
        if not weighs:
            return {}, 0.0
        reached = [p for p in self._named.values() if p.grad is not None]
        for parameter in reached:
            assert parameter.grad is not None
            parameter.grad = parameter.grad / (weight * factor)
        gradients = {n: p.grad.clone() for n, p in self._named.items() if p.grad is not None}
        norm = math.sqrt(sum(_square_sum(gradient) for gradient in gradients.values()))
        clip = self._task.recipe.clip
        if clip is not None and clip < norm + 1e-6:
            for parameter in reached:
                assert parameter.grad is not None
                parameter.grad = parameter.grad * (clip / (norm + 1e-6))
        if math.isfinite(norm):
            self._optimizer.step()
            self._nominal = weight
            with torch.no_grad():
                for name, master in self._masters.items():
                    self._copies[name].copy_(master)
        if self._task.recipe.precision == "fp16":
            self._scale = self._scale.after(math.isfinite(norm))
        return gradients, norm

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every number that the optimizer keeps, by ``PARAMETER/KEY``."""
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}/{key}", value
                elif isinstance(value, bool | int | float):
                    yield f"{name}/{key}", torch.tensor(float(value), dtype=torch.float64)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named.items()
        yield from self._model.named_buffers()

    def _save(self, step: int, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """Writes one step's file. Returns the largest magnitude by measure."""
        dense = {name: tensor.to_dense() if tensor.is_sparse else tensor for name, tensor in tensors.items()}
        kept = {name: tensor.detach().clone().contiguous() for name, tensor in dense.items()}
        # The format has no complex128: a last axis of two stands for it, and the file says so.
        complex_ = {name: "complex" for name, tensor in kept.items() if tensor.is_complex()}
        plain = {name: torch.view_as_real(tensor) if name in complex_ else tensor for name, tensor in kept.items()}
        save_file(plain, self._folder / f"step-{step}.safetensors", complex_)
        by_measure: dict[str, list[torch.Tensor]] = {}
        for name, tensor in kept.items():
            by_measure.setdefault(measure_of(name, tensor), []).append(tensor)
        return {measure: magnitude(members) for measure, members in by_measure.items()}


def measure_of(name: str, tensor: torch.Tensor) -> str:
    """What a tensor of a reference's file is measured with: ``gradient``, ``weight``, ``state/KEY``, or, of whole
    numbers (a BatchNorm's count of batches), by itself under its own name."""
    if name.startswith(OPTIMIZER):
        return f"state/{name.rpartition('/')[2]}"
    if not tensor.is_floating_point() and not tensor.is_complex():
        return name
    return "gradient" if name.startswith("gradient/") else "weight"


def _norm_in_float32(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Torch's own BatchNorm on widened values: it takes no parameters of a lower type than its statistics."""
    low = dict(norm._parameters)
    norm._parameters.update({name: None if p is None else p.float() for name, p in low.items()})  # type: ignore[misc]
    try:
        return type(norm).forward(norm, x.float()).to(x.dtype)
    finally:
        norm._parameters.update(low)


def _square_sum(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.abs().double().square().sum())


def _prefixed(prefix: str, tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((prefix + name, tensor) for name, tensor in tensors)


def _aliases(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """The further names of every parameter that has several, by its first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: tuple(found[1:]) for found in names.values() if len(found) > 1}


def _generators() -> tuple[Any, ...]:
    """The global generators' states, as something that can be compared."""
    import numpy

    kind, keys, *rest = numpy.random.get_state()
    drawn = numpy.asarray(keys).tobytes()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, drawn, *rest
