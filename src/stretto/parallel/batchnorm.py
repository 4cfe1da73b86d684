"""BatchNorm over the global batch, on any device.

One device normalises with the statistics of the whole batch (Ioffe and Szegedy, arXiv 1502.03167); a rank sees only its
share. Counts, means and centred squares are gathered and merged (Chan, Golub, LeVeque 1983), so that running statistics
and gradients are those of one device. A ghost's samples count for nothing but enter every collective. Torch's
SyncBatchNorm takes no CPU tensors and would count the ghosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.comm.members import Members

Statistics = tuple[Tensor, Tensor, Tensor]
"""Mean and variance of each channel, and the number of what they were taken from, over all ranks."""


def batch_norms(module: nn.Module) -> list[str]:
    """Names of the submodules that normalise over the batch while training."""
    return [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]


def widen_norms(module: nn.Module) -> nn.Module:
    """The module, whose BatchNorms compute in float32 where forward has weights of a lower type, as they do under every
    plan: torch's take none of a lower type than their statistics. For a trace, which has torch's own operations."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.forward = partial(_in_float32, child)  # type: ignore[method-assign]
    return module


def _in_float32(module: _BatchNorm, x: Tensor) -> Tensor:
    """Torch's forward but for the types."""
    wide, low = _wide(x.dtype), dict(module._parameters)
    module._parameters.update({name: None if one is None else one.to(wide) for name, one in low.items()})  # type: ignore[misc]
    try:
        return type(module).forward(module, x.to(wide)).to(x.dtype)
    finally:
        module._parameters.update(low)


class GlobalBatchNorm:
    """Makes every BatchNorm of ``module`` (a layout's copy) normalise over all ranks of ``group``."""

    def __init__(self, module: nn.Module, group: Members) -> None:
        self.group = group
        self.counts = True
        self._notes: list[Statistics] | None = None
        self._replays: Iterator[Statistics] | None = None
        self._changed = [child for child in module.modules() if isinstance(child, _BatchNorm)]
        for child in self._changed:
            child.forward = partial(_forward, self, child)  # type: ignore[method-assign]

    @property
    def active(self) -> bool:
        """Whether there is any BatchNorm, and so a collective."""
        return bool(self._changed)

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Whether this rank's samples count in what is normalised inside."""
        before, self.counts = self.counts, counts
        try:
            yield
        finally:
            self.counts = before

    @contextmanager
    def noting(self, into: list[Statistics]) -> Iterator[None]:
        """Notes the statistics of every forward inside."""
        before, self._notes = self._notes, into
        try:
            yield
        finally:
            self._notes = before

    @contextmanager
    def replaying(self, noted: list[Statistics]) -> Iterator[None]:
        """Every forward inside takes the statistics that one noted, sends nothing, and moves no running statistic."""
        before, self._replays = self._replays, iter(noted)
        try:
            yield
        finally:
            self._replays = before

    def known(self) -> Statistics | None:
        """The next noted statistics, where forward is run again."""
        return None if self._replays is None else next(self._replays)

    def note(self, statistics: Statistics) -> None:
        """Keeps the statistics, where that was asked for."""
        if self._notes is not None:
            self._notes.append(statistics)

    def remove(self) -> None:
        """Gives the modules their own forward back."""
        for child in self._changed:
            child.__dict__.pop("forward", None)


class NormOfAll(nn.Module):
    """What a traced graph calls in place of a batch norm that trains: the same, over all ranks of the group."""

    def __init__(self, norm: GlobalBatchNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """As aten's; counting the batches is another operation of the graph."""
        normalised, found = _normalise(self._norm, x, weight, bias, eps)
        if found is not None and running_mean is not None and running_var is not None:
            _move(running_mean, running_var, momentum, found[0], found[1], float(found[2]))
        return normalised


def _forward(norm: GlobalBatchNorm, module: _BatchNorm, x: Tensor) -> Tensor:
    if not module.training and module.running_mean is not None:
        scale = 0.0 if module.momentum is None else module.momentum
        weight, bias = (part if part is None else part.to(_wide(x.dtype)) for part in (module.weight, module.bias))
        wide = x.to(_wide(x.dtype))
        return F.batch_norm(wide, module.running_mean, module.running_var, weight, bias, False, scale, module.eps).to(
            x.dtype
        )
    normalised, found = _normalise(norm, x, module.weight, module.bias, module.eps)
    if found is not None and module.training and module.track_running_stats and module.running_mean is not None:
        _track(module, found[0], found[1], float(found[2]))
    return normalised


def _normalise(
    norm: GlobalBatchNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Statistics | None]:
    """And the statistics, where they are new."""
    known = norm.known()
    normalised, *found = _Normalise.apply(x, norm.group, norm.counts, eps, known)  # type: ignore[no-untyped-call]
    mean, variance, count = found
    if known is None:
        norm.note((mean, variance, count))
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    if weight is not None:
        normalised = normalised * weight.to(normalised.dtype).view(shape)
    if bias is not None:
        normalised = normalised + bias.to(normalised.dtype).view(shape)
    return cast(Tensor, normalised.to(x.dtype)), (mean, variance, count) if known is None else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: torch has no BatchNorm whose parameters are of a lower type than its statistics."""
    return dtype if dtype == torch.float64 else torch.float32


@torch.no_grad()
def _track(module: _BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    assert module.running_mean is not None and module.running_var is not None
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    _move(module.running_mean, module.running_var, 0.0 if momentum is None else momentum, mean, variance, count)


@torch.no_grad()
def _move(
    running_mean: Tensor, running_var: Tensor, factor: float, mean: Tensor, variance: Tensor, count: float
) -> None:
    unbiased = variance * (count / max(count - 1.0, 1.0))
    running_mean.lerp_(mean.to(running_mean.dtype), factor)
    running_var.lerp_(unbiased.to(running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps)`` with the mean and variance of all ranks; x is [batch, channels, ...].

    What it returns is float32 where x is of a lower precision, so that it is rounded once, behind weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Members, counts: bool, eps: float, known: Statistics | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [0, *range(2, x.ndim)]
        wide = x.to(_wide(x.dtype))
        mean, variance, total = _gathered(wide, axes, group, counts) if known is None else known
        shape = (1, -1, *(1 for _ in axes[1:]))
        inverse = torch.rsqrt(variance + eps).to(wide.dtype)
        normalised = (wide - mean.to(wide.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse, total)
        ctx.group, ctx.axes, ctx.shape, ctx.counts, ctx.dtype = group, axes, shape, counts, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normalised, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        normalised, inverse, total = ctx.saved_tensors
        sums = torch.cat([grad.sum(ctx.axes), (grad * normalised).sum(ctx.axes)]).double()
        ctx.group.all_reduce(sums)
        channels = inverse.numel()
        over = (sums / total).to(grad.dtype)
        mean_grad, mean_product = over[:channels].view(ctx.shape), over[channels:].view(ctx.shape)
        inner = grad - mean_grad - normalised * mean_product
        if not ctx.counts:  # a ghost moved no statistic, so nothing flows back through one
            inner = torch.zeros_like(grad)
        return (inner * inverse.view(ctx.shape)).to(ctx.dtype), None, None, None, None


def _gathered(wide: Tensor, axes: list[int], group: Members, counts: bool) -> Statistics:
    """The statistics over all ranks; every rank must call it."""
    channels = wide.shape[1]
    own = float(wide.numel() // max(channels, 1)) if counts else 0.0
    variance, mean = torch.var_mean(wide, axes, correction=0)
    count = torch.full((1,), own, dtype=torch.float64, device=wide.device)
    # Statistics travel in float64, so that merging adds no rounding to what the ranks measured.
    parts = torch.stack(group.all_gather(torch.cat([count, mean.double(), variance.double() * own])))
    counted, means, squares = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
    total = counted.sum()
    mean = (counted * means).sum(0) / total
    return mean, (squares + counted * (means - mean) ** 2).sum(0) / total, total
