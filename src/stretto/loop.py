"""The training loop, on one screen, naming no strategy."""

from __future__ import annotations

from typing import Any

from stretto.run import Run


def train(run: Run) -> dict[str, Any]:
    """Steps through everything that is left of ``run`` and finishes it; returns the summary.

    Every worker must call it.
    """
    for batch in run.batches():
        run.step(batch)
        if run.evaluation_due:
            run.evaluate()
    return run.finish()
