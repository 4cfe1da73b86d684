"""Evaluation: totals over a whole split, exact on every plan.

Pairs are added up on each rank and then over the ranks; rows go to their samples' places. All ranks get one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from stretto.comm.members import Members
from stretto.data import Feeder, Generators, Piece, cut, derive_seed, to_device
from stretto.errors import TaskError
from stretto.machinery import Machinery, call_of, forward
from stretto.plan import Plan
from stretto.precision import computing
from stretto.task import Task

if TYPE_CHECKING:
    from stretto.metrics import Metric, Total

EPOCH: Final = "evaluate"  # of samples that are evaluated, as a feeder is asked for them
Form = list[Any]  # ["pair", shape of the sum, shape of the weight] or ["rows", shape of a row, element type]; JSON


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; training mode and the generators as they were afterwards."""
    before, generators = module.training, Generators.remember()
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(before)
        generators.restore()


def evaluate(
    task: Task, plan: Plan, on: Machinery, feeder: Feeder, moved: Callable[[], None] = lambda: None
) -> dict[str, Total]:
    """Totals of the loss and of every metric over the whole split, exact on every plan.

    A pair becomes (sum, weight), each a float, or a float64 tensor where it has axes. Rows become one tensor
    [samples, ...] in the dataset's order, float64 or int64. Of a loss of several terms each has its pair, and ``loss``
    is the sum of their means, of weight 1.

    The split is cut into global batches and these over the ranks, as in training; nothing is padded, dropped or counted
    twice. Every rank must call it; all get the same totals.

    Raises:
        TaskError: an empty split, shapes of one metric that differ, rows that are not one for each sample.
    """
    table, terms = _added(task, plan, on, feeder, moved)
    totals = table.of_all_ranks(on.group, len(feeder))
    if "loss" in totals:
        return totals
    named: list[str] = next(filter(None, on.group.gather_json(list(terms))), [])
    return {"loss": _sum_of_means([totals[name] for name in named]), **totals}


def evaluate_ends(task: Task, plan: Plan, on: Machinery, feeder: Feeder) -> None:
    """This rank's part of an evaluation's first global batch and of its last, which may be shorter: to know what
    evaluating takes."""
    _added(task, plan, on, feeder, lambda: None, ends=True)


def _added(
    task: Task, plan: Plan, on: Machinery, feeder: Feeder, moved: Callable[[], None], ends: bool = False
) -> tuple[_Table, Iterable[str]]:
    """What this rank adds up over the split, or over its ends alone, and the names of its losses."""
    recipe = task.recipe
    if not len(feeder):
        raise TaskError("task: the split to evaluate is empty; data() must give it a sample, or leave it out")
    feeder.expect((piece.ids, EPOCH) for piece in pieces_to_evaluate(task, plan, on, feeder, ends))
    table = _Table()
    terms: dict[str, None] = {}
    on.applied.refresh()
    with evaluating(on.applied.module):
        for piece in pieces_to_evaluate(task, plan, on, feeder, ends):
            moved()
            samples = to_device(feeder.get(piece.ids, EPOCH), on.group.device)
            with on.applied.microbatch(last=True, ghost=piece.ghost), on.group.guard():
                call, seed = call_of(task, on, samples), derive_seed(recipe.seed, "evaluate", piece.first)
                output = forward(task, on, on.applied.module, call, seed)
            if not on.applied.ranks.counts:
                continue
            with computing(recipe.precision, on.group.device.type):
                losses = task.losses(output, samples)
                terms |= dict.fromkeys(losses)
                found: dict[str, Metric] = {} if piece.ghost else {**losses, **task.metrics(output, samples)}
            for name, metric in found.items():
                table.add(name, metric, piece.ids)
    return table, terms


def _sum_of_means(terms: Sequence[Total]) -> tuple[float, float]:
    """The loss of several terms, as a pair of weight 1; a term without weight says nothing."""
    means = [float(total) / float(weight) for total, weight in terms if float(weight)]
    return sum(means), float(bool(means))


def pieces_to_evaluate(task: Task, plan: Plan, on: Machinery, feeder: Feeder, ends: bool = False) -> Iterator[Piece]:
    """What this rank evaluates, in order, or only of the split's first global batch and its last; ``first`` counts in
    the whole split."""
    length, size = len(feeder), task.recipe.eval_batch or task.recipe.batch
    starts = range(0, length, size)
    for start in sorted({starts[0], starts[-1]}) if ends else starts:
        for piece in cut(range(start, min(start + size, length)), plan.dp, 1, on.data.rank):
            yield replace(piece, first=start + piece.first)


class _Table:
    """What one rank has added up, by the names of the metrics."""

    def __init__(self) -> None:
        self._forms: dict[str, Form] = {}
        self._pairs: dict[str, torch.Tensor] = {}  # the sum's elements, then the weight's
        self._rows: dict[str, list[tuple[Sequence[int], torch.Tensor]]] = {}

    def add(self, name: str, metric: Metric, ids: Sequence[int]) -> None:
        """One batch. Raises TaskError for another shape than before, or rows that are not those of ``ids``."""
        if isinstance(metric, torch.Tensor):
            if len(metric) != len(ids):
                raise TaskError(
                    f"task: metrics()[{name!r}] has {len(metric)} rows for {len(ids)} samples; a metric of one tensor "
                    "is kept row by row, so its first axis must be the samples; to add it up, return the pair "
                    "(sum, weight)"
                )
            kind = torch.float64 if metric.is_floating_point() else torch.int64  # ids stay exact
            _learn(self._forms, name, ["rows", list(metric.shape[1:]), str(kind).removeprefix("torch.")])
            self._rows.setdefault(name, []).append((ids, metric.detach().to("cpu", kind)))
            return
        _learn(self._forms, name, ["pair", *(list(part.shape) for part in metric)])
        flat = torch.cat([part.detach().double().flatten().cpu() for part in metric])
        self._pairs[name] = self._pairs[name] + flat if name in self._pairs else flat

    def of_all_ranks(self, group: Members, length: int) -> dict[str, Total]:
        """The totals over all ranks. Every rank must call it."""
        forms: dict[str, Form] = {}
        counts: dict[str, int] = {}
        rows = {name: sum(len(ids) for ids, _ in parts) for name, parts in self._rows.items()}
        for theirs, their_rows in group.gather_json([self._forms, rows]):  # a rank may have had no sample at all
            for name, form in theirs.items():
                _learn(forms, name, form)
                counts[name] = counts.get(name, 0) + their_rows.get(name, 0)
        for name, form in forms.items():
            if form[0] == "rows" and counts[name] != length:
                raise TaskError(
                    f"task: metrics()[{name!r}] has rows for {counts[name]} of the split's {length} samples; return "
                    "it for every batch"
                )
        pairs = self._added(group, {name: form for name, form in forms.items() if form[0] == "pair"})
        return {
            name: pairs[name] if form[0] == "pair" else self._gathered(group, name, form, length)
            for name, form in forms.items()
        }

    def _added(self, group: Members, forms: dict[str, Form]) -> dict[str, Total]:
        """All pairs, by one all-reduce."""
        shapes = {name: [torch.Size(shape) for shape in form[1:]] for name, form in forms.items()}
        sizes = {name: [shape.numel() for shape in pair] for name, pair in shapes.items()}
        cells = torch.cat(
            [self._pairs.get(name, torch.zeros(sum(s), dtype=torch.float64)) for name, s in sizes.items()]
        )
        group.all_reduce(cells)
        found: dict[str, Total] = {}
        for name, flat in zip(sizes, torch.split(cells, [sum(pair) for pair in sizes.values()]), strict=True):
            above, below = (part.view(s) for part, s in zip(torch.split(flat, sizes[name]), shapes[name], strict=True))
            found[name] = above if above.ndim else float(above), below if below.ndim else float(below)
        return found

    def _gathered(self, group: Members, name: str, form: Form, length: int) -> torch.Tensor:
        """The rows of all ranks at their samples' places: each adds its own to zeros, which changes no number."""
        whole = torch.zeros([length, *form[1]], dtype=getattr(torch, form[2]))
        for ids, rows in self._rows.get(name, ()):
            whole.index_add_(0, torch.tensor(ids), rows)
        group.all_reduce(whole)
        return whole


def _learn(forms: dict[str, Form], name: str, form: Form) -> None:
    """Notes the form of a metric. Raises TaskError where it was another before, on this rank or elsewhere."""
    known = forms.setdefault(name, form)
    if known != form:
        raise TaskError(
            f"task: metrics()[{name!r}] changes between batches: {_told(known)}, then {_told(form)}; what is added up, "
            "or kept row by row, must have one shape"
        )


def _told(form: Form) -> str:
    kind, first, second = form
    return f"a pair of shapes {first} and {second}" if kind == "pair" else f"rows of shape {first} ({second})"
