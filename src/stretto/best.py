"""The best evaluation of a run: its checkpoint stays, whatever the number of checkpoints to keep.

Every rank follows the metric and comes to the same decisions, because an evaluation gives every rank the same numbers.
A better one makes its step's checkpoint due at the next safe point; the committer never deletes that one until a better
one is safe on the disk, and writes ``best.json`` in between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stretto.checkpoint.names import step_name
from stretto.errors import RecipeError, TaskError, nearest
from stretto.recipe import Recipe
from stretto.runfolder import write_text

BEST_NAME: Final = "best.json"


@dataclass(frozen=True)
class Best:
    """The best evaluation: ``path`` is its checkpoint, seen from the run folder; ``order`` is highest or lowest."""

    step: int
    metric: str
    order: str
    value: float
    path: str


class BestSoFar:
    """Follows the recipe's ``best`` through a run. Without one it is silent: nothing is ever due or pinned."""

    def __init__(self, recipe: Recipe, folder: Path, splits: Collection[str]) -> None:
        """Raises TaskError where there is nothing to evaluate."""
        self._folder = folder
        self._order, self._metric = recipe.best_order_and_metric or ("", "")
        self._best: Best | None = None
        self._due: int | None = None
        self._records: dict[int, Best] = {}  # of saves that are not committed; read by the writer's thread
        if self._metric and "val" not in splits:
            raise TaskError(
                f"recipe: best={recipe.best} needs a held-out split: data() returns no split named 'val', but "
                f"{', '.join(splits)}"
            )

    def look(self, step: int, found: Mapping[str, float]) -> None:
        """Takes note of an evaluation after ``step``. Raises RecipeError where the metric is not in it."""
        if not self._metric:
            return
        if self._metric not in found:
            raise RecipeError(
                f"recipe: best names the metric {self._metric!r}, which the evaluation does not give; it gives "
                f"{', '.join(found)}{nearest(self._metric, found)}"
            )
        value, sign = float(found[self._metric]), 1 if self._order == "highest" else -1
        if math.isfinite(value) and (self._best is None or sign * value > sign * self._best.value):
            self._best = Best(step, self._metric, self._order, value, f"checkpoints/{step_name(step)}")
            self._due, self._records[step] = step, self._best

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` is the best and not saved yet."""
        return self._due == step

    def pin(self) -> int | None:
        """The step whose checkpoint must stay, at a save; nothing is due after it."""
        self._due = None
        return None if self._best is None else self._best.step

    def committed(self, step: int) -> None:
        """On the committer, once a checkpoint is safe and before older ones are deleted: writes ``best.json``."""
        record = self._records.pop(step, None)
        if record is not None:
            self._write(record)

    def to_json(self) -> dict[str, Any] | None:
        """For a checkpoint and for the summary."""
        return None if self._best is None else asdict(self._best)

    def resume(self, record: dict[str, Any] | None, writes: bool) -> None:
        """Goes on from what a checkpoint holds; one of another metric counts no more.

        ``writes``: on one rank, brings ``best.json`` up to date, as a run may have died just before it did.
        """
        if record is None or (record["order"], record["metric"]) != (self._order, self._metric):
            return
        self._best = Best(**record)
        if writes and (self._folder / self._best.path).is_dir():
            self._write(self._best)

    def _write(self, best: Best) -> None:
        write_text(self._folder / BEST_NAME, json.dumps(asdict(best), indent=1) + "\n")
