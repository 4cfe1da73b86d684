"""Recipe: how a task is learnt. Everything here may change the numbers, which is why it is not in the Plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from stretto.errors import RecipeError, nearest

PRECISIONS: Final = ("fp32", "fp64", "bf16", "fp16", "bf16-autocast")
SYNC_RULES: Final = ("exact",)
LATER_SYNC_RULES: Final = ("local", "server")
BEST_ORDERS: Final = ("lowest", "highest")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the task is learnt.

    Args:
        batch: samples in one global batch, whatever the number of workers.
        steps: committed optimizer steps of the whole run.
        precision: ``fp32`` or ``fp64``: the type of weights, gradients, reductions and optimizer state; ``bf16`` or
            ``fp16``: forward and backward compute in it, with copies of float32 weights, and everything else is
            float32; ``bf16-autocast``: torch.autocast chooses operation by operation.
        clip: largest norm of the global gradient, or None for no clipping.
        seed: every generator of the run derives from it.
        eval_every: evaluate on ``data()["val"]`` after every so many steps; 0 means once, at the end.
        eval_batch: samples in one global evaluation batch; default: ``batch``.
        save_every: checkpoint after every so many steps; 0 means once, at the end.
        keep: checkpoints to keep; the newest whole one is never deleted.
        best: what makes an evaluation the best, as in ``highest accuracy`` or ``lowest loss`` (``loss`` alone means
            the same): the checkpoint of the best step so far is kept besides the newest.
        sync: the rule of the replicate axis; ``exact`` adds every gradient at every step.
        unit: what one unit of loss weight counts, for people (``samples``, ``tokens``, ``bytes``).
    """

    batch: int
    steps: int
    precision: str = "fp32"
    clip: float | None = None
    seed: int = 0
    eval_every: int = 0
    eval_batch: int | None = None
    save_every: int = 0
    keep: int = 2
    best: str | None = None
    sync: str = "exact"
    unit: str = "samples"

    def __post_init__(self) -> None:
        """Raises RecipeError naming the field, the value and what is valid."""
        for name, least in (("batch", 1), ("steps", 1), ("eval_every", 0), ("save_every", 0), ("keep", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RecipeError(f"recipe: {name} must be a whole number of at least {least}, got {value!r}")
        if self.eval_batch is not None and (not isinstance(self.eval_batch, int) or self.eval_batch < 1):
            raise RecipeError(f"recipe: eval_batch must be a whole number of at least 1, got {self.eval_batch!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise RecipeError(f"recipe: seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise RecipeError(f"recipe: clip must be a positive number or null, got {self.clip!r}")
        if self.best is not None and self.best_order_and_metric is None:
            raise RecipeError(_best_is_unclear(self.best))
        _one_of("precision", self.precision, PRECISIONS, ())
        _one_of("sync", self.sync, SYNC_RULES, LATER_SYNC_RULES)

    @property
    def best_order_and_metric(self) -> tuple[str, str] | None:
        """``best`` in two words, such as ("highest", "accuracy"); None without it, or where it says something else."""
        text = str(self.best).strip()
        order, _, metric = ("lowest loss" if text == "loss" else text).partition(" ")
        return (order, metric.strip()) if order in BEST_ORDERS and metric.strip() else None

    def without_effect(self, splits: Collection[str]) -> list[str]:
        """A line for each field that does nothing, or less than it says, with these splits of the data."""
        if self.eval_every and "val" not in splits:
            return [f"eval_every={self.eval_every} has no effect: data() returns no split named 'val'"]
        if self.best is not None and not self.eval_every:
            return [f"best={self.best}: eval_every=0 evaluates at the end only, unless the loop calls run.evaluate()"]
        return []

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names that ``--set`` may give, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))


def _best_is_unclear(best: object) -> str:
    """A guess by the name would keep the worst checkpoint of a run, so nothing is guessed."""
    words = str(best).split()
    if len(words) == 1 and words[0] not in BEST_ORDERS:
        return f"recipe: best={best}: say which way is better: best='highest {best}' or best='lowest {best}'"
    hint = nearest(words[0], BEST_ORDERS) if len(words) > 1 else ""
    return f"recipe: best must be 'highest METRIC' or 'lowest METRIC', got {best!r}{hint}"


def _one_of(field: str, value: object, valid: tuple[str, ...], later: tuple[str, ...]) -> None:
    if value in valid:
        return
    if value in later:
        raise RecipeError(f"recipe: {field}={value} is planned but not built yet; use one of {', '.join(valid)}")
    raise RecipeError(f"recipe: {field} must be one of {', '.join(valid)}, got {value!r}{nearest(str(value), valid)}")
