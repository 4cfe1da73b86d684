"""The plans that so many workers could train by, for a model that is there to be run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from stretto.errors import PlanError
from stretto.plan import ZERO_STAGES, Plan
from stretto.schedule import SCHEDULES

CHUNKS = 2  # stages on each rank of an interleaved schedule


def candidates(workers: int, batch: int, recompute: str = "none") -> tuple[Plan, ...]:
    """Each way to have ``dp x tp x pp`` make ``workers``, with each ``zero``, each schedule, and one, two and four
    times as many microbatches as a pipeline has ranks, as long as each has a sample; and one tower on each worker.

    More microbatches without a pipeline, and recomputation, save memory and cost time: they are for ``recompute`` other
    than ``none``, where nothing fits without.

    Args:
        batch: samples of a step, all workers together.
    """
    saving = recompute != "none"
    found: dict[Plan, None] = {}
    for dp, tp, pp in _factors(workers):
        for zero, sequence in product(ZERO_STAGES if dp > 1 else (0,), (False, True) if tp > 1 else (False,)):
            for schedule, microbatches in _schedules(pp, batch // dp, saving):
                _add(
                    found,
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    sequence=sequence,
                    schedule=schedule,
                    microbatches=microbatches,
                    recompute=recompute,
                )
    if workers > 1:
        _add(found, branch=workers, recompute=recompute)
    return tuple(found)


def _add(found: dict[Plan, None], **values: object) -> None:
    try:
        found[Plan.of(values)] = None
    except PlanError:  # one that means nothing
        return


def _factors(workers: int) -> Iterator[tuple[int, int, int]]:
    for dp in range(workers, 0, -1):
        for tp in range(1, workers // dp + 1):
            if workers % (dp * tp) == 0:
                yield dp, tp, workers // (dp * tp)


def _schedules(pp: int, samples: int, saving: bool) -> Iterator[tuple[str, int]]:
    """Schedules and microbatches; a rank has ``samples``."""
    if pp == 1:
        yield from (("", count) for count in ((1, 2, 4, 8) if saving else (1,)) if count <= max(1, samples))
        return
    for schedule in SCHEDULES:
        for count in (pp, 2 * pp, 4 * pp):
            if count <= samples:
                yield schedule, count
