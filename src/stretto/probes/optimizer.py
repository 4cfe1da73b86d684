"""The optimizer probe: how far an update looks, found by cutting what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.errors import ProbeFailed, one_line
from stretto.task import Params

Factory = Callable[[Params], Optimizer]

TOLERANCE: Final = 1e-12
SHAPE: Final = (6, 4)
# An optimizer that estimates its own step size (D-adaptation, Prodigy) needs some steps, with gradients that agree in
# part, before the estimate moves; one that clips inside does so only where a gradient is long.
SCALES: Final = (1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 1.0, 1.0)
COMMON: Final = 2.0


class Reach(NamedTuple):
    """How far one element's update looks.

    Args:
        kind: ``element``: only at itself, so tensors may be cut anywhere. ``tensor``: at the whole tensor (Muon, LAMB,
            Adafactor, Shampoo), so each must lie whole somewhere. ``all``: at other parameters too (Prodigy, clipping
            inside the optimizer), so all must lie together.
        error: how far the update of a part was from the part of the update, relative to the largest change.
    """

    kind: Literal["element", "tensor", "all"]
    error: float


def optimizer_reach(factory: Factory) -> Reach:
    """How far an optimizer's updates look: updates of a 6 x 4 parameter, beside a second one, beside another, in parts.

    There are two parameters throughout, as a factory may choose groups by number or place. An optimizer that works
    element by element gives an error of 0 exactly.

    Raises:
        ProbeFailed: the factory can't work on parameters of the probe's own.
    """
    before = torch.get_rng_state()
    drawn = torch.Generator().manual_seed(0)
    first, second = _Trial.draw(SHAPE, drawn), _Trial.draw((5, 3), drawn)
    try:
        whole = _train(factory, [first, second])
        beside_another = _train(factory, [first, _Trial.draw((5, 3), drawn)])[0]
        other = _train(factory, [_Trial.draw(SHAPE, drawn), second])[1]
    except Exception as error:  # the factory is the user's, and may ask for anything
        raise ProbeFailed(one_line(error)) from error
    else:
        if (apart := max(_apart(whole[0], beside_another, first), _apart(whole[1], other, second))) > TOLERANCE:
            return Reach("all", apart)
        apart = max(_cut_error(factory, first, second, axis) for axis in (0, 1))
        return Reach("tensor" if apart > TOLERANCE else "element", apart)
    finally:
        torch.set_rng_state(before)


class _Trial(NamedTuple):
    """A parameter's first value and its gradients, of one shape."""

    start: Tensor
    gradients: Sequence[Tensor]

    @classmethod
    def draw(cls, shape: tuple[int, ...], drawn: torch.Generator) -> _Trial:
        start, common = (torch.randn(shape, generator=drawn, dtype=torch.float64) for _ in range(2))
        noise = (torch.randn(shape, generator=drawn, dtype=torch.float64) for _ in SCALES)
        return cls(start, [scale * (COMMON * common + each) for scale, each in zip(SCALES, noise, strict=True)])

    def halves(self, axis: int) -> list[_Trial]:
        parts = zip(*(tensor.chunk(2, axis) for tensor in (self.start, *self.gradients)), strict=True)
        return [_Trial(start, gradients) for start, *gradients in parts]


def _cut_error(factory: Factory, trial: _Trial, beside: _Trial, axis: int) -> float:
    """How far the updates of two halves are from the whole's. Halves that the optimizer refuses can't be cut either."""
    try:
        whole = _train(factory, [trial, beside])[0]
        halves = [_train(factory, [half, beside])[0] for half in trial.halves(axis)]
    except Exception:
        return 1.0
    return _apart(whole, torch.cat(halves, axis), trial)


def _apart(one: Tensor, other: Tensor, trial: _Trial) -> float:
    moved = float((one - trial.start).abs().max())
    return float((one - other).abs().max()) / moved if moved else 0.0


def _train(factory: Factory, trials: Sequence[_Trial]) -> list[Tensor]:
    torch.manual_seed(0)  # a factory or an optimizer that draws numbers draws the same each time
    parameters = [nn.Parameter(trial.start.clone()) for trial in trials]
    optimizer = factory(Params((f"probe.{place}", parameter) for place, parameter in enumerate(parameters)))
    for gradients in zip(*(trial.gradients for trial in trials), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
