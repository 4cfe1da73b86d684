"""Layers that backward computes again otherwise than forward computed them."""

from __future__ import annotations

from typing import Any

from stretto.testing.faults.planting import FAULTY_STEP, note_batches


def other_numbers_in_the_second_forward(rank: int) -> None:
    """From the faulty step on random numbers are drawn anew where a layer is computed again."""
    from stretto.data import Generators
    from stretto.parallel.again import _Again

    honest, seen = _Again.__enter__, list[tuple[int, ...]]()
    note_batches(seen)

    def enter(self: Any) -> None:
        now = Generators.remember()
        honest(self)
        if len(seen) >= FAULTY_STEP:
            now.restore()

    _Again.__enter__ = enter  # type: ignore[method-assign]


def statistics_moved_twice(rank: int) -> None:
    """Where a layer is computed again, its BatchNorms move their running statistics again."""
    from stretto.parallel import batchnorm

    honest, known, last = batchnorm._forward, batchnorm.GlobalBatchNorm.known, list[Any]()

    def forward(norm: Any, module: Any, x: Any) -> Any:
        last.clear()
        output = honest(norm, module, x)
        for mean, variance, count in last:
            batchnorm._track(module, mean, variance, float(count))
        return output

    def note(self: Any) -> Any:
        statistics = known(self)
        last.extend(filter(None, [statistics]))
        return statistics

    vars(batchnorm)["_forward"] = forward
    batchnorm.GlobalBatchNorm.known = note  # type: ignore[method-assign]


def stages_change_buffers_twice(rank: int) -> None:
    """Where a stage is computed again, it changes its buffers again."""
    from stretto.parallel.stretches import _Call

    honest = _Call.begin

    def begin(self: Any) -> Any:
        _, run_graph = honest(self)
        return self._fixed, run_graph

    _Call.begin = begin  # type: ignore[method-assign]
