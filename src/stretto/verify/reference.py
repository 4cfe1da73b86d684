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
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.data import (
    BatchHandle,
    Position,
    Sampler,
    cut,
    derive_seed,
    fetch,
    seed_everything,
    to_device,
)
from stretto.launch import WorkerContext
from stretto.precision import COMPUTE, cast_model, computing
from stretto.task import Params, Task, load_task
from stretto.verify.compare import magnitude
from stretto.verify.facts import ReferenceRecord, ReferenceStep

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
        self._norms = tuple(n for n, module in self._model.named_modules() if isinstance(module, _BatchNorm))
        self._dataset = task.data()["train"]
        self._optimizer = task.optimizer(Params(self._named.items()))
        self._schedule = task.schedule(self._optimizer)
        self._random = False

    def run(self, steps: int) -> ReferenceRecord:
        """Takes ``steps`` steps."""
        recipe = self._task.recipe
        initial = self._save(0, dict(_prefixed("model/", _state(self._model))))
        batches = Sampler(len(self._dataset), recipe.batch, recipe.seed).batches(1, Position())  # type: ignore[arg-type]
        taken = tuple(self._step(batch) for batch in islice(batches, steps))
        return ReferenceRecord(
            dtype=str(self._dtype).removeprefix("torch."),
            batch=recipe.batch,
            batch_norms=self._norms,
            random=self._random,
            aliases=_aliases(self._model),
            scales=initial,
            steps=taken,
        )

    def _step(self, batch: BatchHandle) -> ReferenceStep:
        parts = cut(batch.ids, 1, self._pieces, 0)
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum, weight = 0.0, 0.0
        for part in cut(batch.ids, 1, 1, 0) if self._norms else parts:
            if not part.ghost:
                total, share = self._forward(part.ids, part.first, batch)
                total.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(total.detach().double())
                weight += float(share.double())
        gradients, norm = self._update(weight)
        if self._schedule is not None:
            self._schedule.step()
        tensors = {
            **dict(_prefixed("gradient/", gradients.items())),
            **dict(_prefixed("model/", _state(self._model))),
            **dict(_prefixed(OPTIMIZER, self._optimizer_state())),
        }
        return ReferenceStep(
            step=batch.step,
            loss=loss_sum / weight if weight else math.nan,
            norm=norm,
            weight=weight,
            pieces=tuple(() if part.ghost else part.ids for part in parts),
            scales=self._save(batch.step, tensors),
        )

    def _forward(self, ids: tuple[int, ...], first: int, batch: BatchHandle) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses of one piece, with its gradient, and sum of their weights."""
        recipe, cpu = self._task.recipe, torch.device("cpu")
        samples = fetch(self._dataset, ids, self._task.collate, recipe.seed, batch.start.epoch)
        arguments, keywords = self._task.inputs(samples, self._model.forward)
        seed_everything(derive_seed(recipe.seed, "forward", batch.step, first))
        before = _generators()
        with computing(recipe.precision):
            output = self._model(*to_device(arguments, cpu, self._dtype), **to_device(keywords, cpu, self._dtype))
            pair = self._task.loss(output, samples)
        self._random |= _generators() != before
        return pair

    def _update(self, weight: float) -> tuple[dict[str, torch.Tensor], float]:
        """Divides, clips and applies. Returns the gradients of the mean loss and their norm, both before clipping;
        nothing is applied where there is no weight or the norm isn't finite."""
        if weight == 0:
            return {}, 0.0
        reached = [p for p in self._named.values() if p.grad is not None]
        for parameter in reached:
            assert parameter.grad is not None
            parameter.grad /= weight
        gradients = {n: _dense(p.grad) for n, p in self._named.items() if p.grad is not None}
        norm = _clip(reached, math.inf if self._task.recipe.clip is None else self._task.recipe.clip)
        if math.isfinite(norm):
            self._optimizer.step()
        return gradients, norm

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every number that the optimizer keeps, by ``PARAMETER/KEY``."""
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}/{key}", value
                elif isinstance(value, bool | int | float):
                    yield f"{name}/{key}", torch.tensor(float(value), dtype=torch.float64)

    def _save(self, step: int, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """Writes one step's file. Returns the largest magnitude by measure."""
        kept = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(kept, self._folder / f"step-{step}.safetensors")
        by_measure: dict[str, list[torch.Tensor]] = {}
        for name, tensor in kept.items():
            by_measure.setdefault(measure_of(name, tensor), []).append(tensor)
        return {measure: magnitude(members) for measure, members in by_measure.items()}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A copy with every element, of a sparse gradient too."""
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def _clip(reached: list[nn.Parameter], largest: float) -> float:
    """torch's clip_grad_norm_, which takes no sparse gradients: these by the same rule. Returns the norm before."""
    gradients = [p.grad for p in reached if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return float(nn.utils.clip_grad_norm_(reached, largest))
    norm = float(nn.utils.get_total_norm([_dense(gradient) for gradient in gradients]))
    for gradient in gradients:
        gradient *= min(1.0, largest / (norm + 1e-6))
    return norm


def measure_of(name: str, tensor: torch.Tensor) -> str:
    """What a tensor of a reference's file is measured with: ``gradient``, ``weight``, ``state/KEY``, or, of whole
    numbers (a BatchNorm's count of batches), by itself under its own name."""
    if name.startswith(OPTIMIZER):
        return f"state/{name.rpartition('/')[2]}"
    if not tensor.is_floating_point():
        return name
    return "gradient" if name.startswith("gradient/") else "weight"


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


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
