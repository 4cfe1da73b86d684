"""The split probe: a few samples in float64, forward only, as one batch and in pieces.

What adds up over pieces (sums and weights of the loss and the metrics) must add up, each sample's output must be the
same beside any others, and the same samples must give the same twice. Where they don't, no cut of the batch keeps the
numbers; the layers' own outputs then tell which one parted first. Gradients are left to ``stretto verify``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.data import Generators, Sampler, cut
from stretto.errors import TaskError
from stretto.probes.bench import Bench, Pair, Pass, Stage, UsersError
from stretto.probes.trees import difference, first_difference
from stretto.probes.verdict import Findings
from stretto.task import Task

SAMPLES: Final = 5
WAY_OUT: Final = "or keep each batch whole with dp=1,microbatches=1"
SUMS: Final = "return the sum of the losses and the sum of their weights, as stretto.losses does"


def split_probe(task: Task, model: nn.Module, dataset: Dataset[Any]) -> Findings:
    """Looks for what no cut of a batch keeps. The model given is changed and of no other use; the generators are kept.

    Raises:
        TaskError: as the user's functions do.
        UsersError: they raised something else, be it only because they can't work in float64.
    """
    before = Generators.remember()
    try:
        recipe = task.recipe
        order = Sampler(len(dataset), recipe.batch, recipe.seed).order(0)  # type: ignore[arg-type]
        ids = tuple(int(each) for each in order[: min(SAMPLES, recipe.batch)])
        if len(ids) < 2:
            return Findings()
        return _Split(Bench(task, model, dataset, ids)).findings()
    finally:
        before.restore()


class _Split:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._size = len(bench.ids)
        self._notes: list[str] = []
        self._tolerance = 1e-9

    def findings(self) -> Findings:
        """Everything, the cheapest and plainest first."""
        if broken := self._reading() or self._repeating():
            return Findings(broken=broken)
        whole = self._bench.run(0, self._size)
        halves = self._halves(whole)
        single = self._pieces([(0, 1), (1, self._size)])
        for pieces in filter(None, (halves, single)):
            if broken := self._compare(whole, pieces):
                return Findings(broken=broken)
            if self._notes:
                break
        buffer, counter = self._buffers(whole, halves)
        written = self._bench.written()
        layers = self._layers() if whole.layers else ""
        return Findings(buffer=buffer, counter=counter, written=written, layers=layers, notes=tuple(self._notes))

    # ---- the same twice

    def _reading(self) -> str:
        """Why reading a sample again gives another one, or nothing."""
        first, second = (self._bench.samples(0, self._size) for _ in range(2))
        for index, one, other in zip(self._bench.ids, first, second, strict=True):
            path = first_difference(one, other)
            if path is not None:
                where = f" (its {path} differs)" if path else ""
                return (
                    f"data(): __getitem__({index}) gave another sample{where} when it was read again under the same "
                    "seeds; a sample must depend on its index alone: draw random numbers from torch's, NumPy's or "
                    "Python's global generator, which are seeded for each sample, and keep no state between reads"
                )
        return ""

    def _repeating(self) -> str:
        """Why the same samples under the same seeds give something else, or nothing; holds random numbers still."""
        one, other = (self._bench.run(0, self._size) for _ in range(2))
        self._tolerance = _tolerance(one.coarsest)
        if _terms_apart(one.terms, [other.terms]) <= self._tolerance and not self._apart(one.output, other.output):
            self._bench.still = one.torch_drew
            return ""
        first, second = (self._bench.run(0, self._size, traced=True) for _ in range(2))
        where, apart = self._parted(first, [second])
        return (
            f"{where or 'loss()'} gave something else for the same samples under the same seeds"
            f"{f' ({apart:.0e} apart)' if apart else ''}; draw random numbers from the global generators of torch, "
            "NumPy or Python, which are seeded, not from a generator of your own, the system or a clock, and keep "
            "state between forwards in buffers only"
        )

    # ---- whole against pieces

    def _halves(self, whole: Pass) -> list[Pass]:
        spans = [cut(range(self._size), 2, 1, rank)[0].ids for rank in range(2)]
        return [self._bench.run(span[0], span[-1] + 1) for span in spans]

    def _pieces(self, spans: Iterable[tuple[int, int]]) -> list[Pass]:
        """Pieces that a plan may never make: nothing where the task can't run one of them."""
        try:
            return [self._bench.run(*span) for span in spans]
        except (TaskError, UsersError):
            return []

    def _compare(self, whole: Pass, pieces: Sequence[Pass]) -> str:
        """What differs between the whole batch and its pieces, with its cause; or nothing."""
        split = " and ".join(str(piece.size) for piece in pieces)
        drew = any(each.torch_drew or each.host_drew for each in (whole, *pieces))
        for name in whole.terms:
            if broken := _weights(name, whole, pieces, split, sure=not drew):
                return broken
        sums = _terms_apart(whole.terms, [piece.terms for piece in pieces])
        outputs = self._output_apart(whole, pieces)
        if max(sums, outputs) > self._tolerance:
            if drew:
                self._notes.append(
                    "forward draws random numbers in a way that could not be held still, so the split probe could "
                    "not compare outputs; `stretto verify` tells whether a plan keeps the numbers"
                )
                return ""
            return self._cause(sums, outputs, whole, pieces, split)
        return self._metrics(whole, pieces, split)

    def _cause(self, sums: float, outputs: float, whole: Pass, pieces: Sequence[Pass], split: str) -> str:
        """Names the first function or layer at which a sample's numbers depend on the samples beside it."""
        traced = [self._bench.run(each.begin, each.begin + each.size, traced=True) for each in (whole, *pieces)]
        alike = [piece for piece in traced[1:] if not _padded(traced[0], piece)]  # otherwise padding is the cause
        where, apart = self._parted(traced[0], alike)
        others = f"in a batch of {self._size} and in pieces of {split}"
        if where:
            return (
                f"{where} gave a sample other numbers {others} ({apart:.0e} apart): it mixes samples of one batch; "
                f"compute each sample by itself (GroupNorm or LayerNorm for statistics of a batch), {WAY_OUT}"
            )
        if outputs > self._tolerance and len(alike) == len(pieces):
            return (
                f"model() gave a sample other outputs {others} ({outputs:.0e} apart): it mixes samples of one batch; "
                f"compute each sample by itself, {WAY_OUT}"
            )
        (name, total, parts) = max(_sums(whole, pieces), key=lambda each: _apart(each[1], each[2]))
        term = f"loss()[{name!r}]" if name else "loss()"
        facts = f"{term}: the sum over {self._size} samples is {total:.6g}, over pieces of {split} {sum(parts):.6g}"
        scalar = _whole_number(whole, pieces, self._tolerance)
        if scalar is None and len(alike) < len(pieces):
            return (
                f"{facts} ({max(sums, outputs):.0e} apart): collate() pads samples to the longest beside them, and the "
                f"model or the loss counts the padding; mask it, pad to one length, {WAY_OUT}"
            )
        why = "though each sample's output is the same"
        if scalar is not None:
            made = type(self._bench.model).__name__
            why = f"of which {made}'s output{scalar}, one number for a whole batch, is a part"
        return (
            f"{facts} ({sums:.0e} apart), {why}: a mean returned as a sum, a contrast within the batch or a balance "
            f"over it can't be added up over pieces; {SUMS}, {WAY_OUT}"
        )

    def _metrics(self, whole: Pass, pieces: Sequence[Pass], split: str) -> str:
        for name, pair in whole.metrics.items():
            parts = [piece.metrics.get(name) for piece in pieces]
            known = [part for part in parts if part is not None]
            for what, place in (("sum", 0), ("weight", 1)):
                apart = _apart(pair[place], [part[place] for part in known])
                if len(known) == len(parts) and apart > self._tolerance:
                    return (
                        f"metrics()[{name!r}] doesn't add up: its {what} over {self._size} samples is "
                        f"{pair[place]:.6g}, over pieces of {split} {sum(part[place] for part in known):.6g}; return "
                        "sums and counts, and make what isn't a ratio of them in summarize()"
                    )
        return ""

    # ---- beside the numbers

    def _buffers(self, whole: Pass, pieces: Sequence[Pass]) -> tuple[str, str]:
        """A buffer that pieces change in different ways, and one that each forward changes alike."""
        start, buffer, counter = self._bench.buffers, "", ""
        for name, value in whole.buffers.items():
            each = [piece.buffers[name] for piece in pieces]
            if any(difference(value, other) > self._tolerance for other in each):
                buffer = buffer or name
            elif difference(start[name], value):
                counter = counter or name
        return buffer, counter

    def _layers(self) -> str:
        """The first layer of a list that some samples call and others don't."""
        calls = [each.layers for each in self._pieces((place, place + 1) for place in range(self._size))]
        for step in range(max(map(len, calls), default=0)):
            names = {each[step] if step < len(each) else "" for each in calls}
            if len(names) > 1:
                return min(names - {""})
        return ""

    # ---- where

    def _parted(self, whole: Pass, others: Sequence[Pass]) -> tuple[str, float]:
        """The first stage at which a sample's numbers differ, and by how much."""
        for place, stage in enumerate(whole.stages):
            for other in others:
                if place >= len(other.stages) or other.stages[place].name != stage.name:
                    return "", 0.0
                apart = _stage_apart(stage, other.stages[place], other, self._size)
                if apart > self._tolerance:
                    return stage.name, apart
        return "", 0.0

    def _output_apart(self, whole: Pass, pieces: Sequence[Pass]) -> float:
        found = [0.0]
        for piece in pieces:
            for path, tensor in whole.output.items():
                other = piece.output.get(path)
                part = None if other is None else _part(tensor, other, piece, self._size, flat=False)
                if other is not None and part is not None:
                    found.append(difference(part, other))
        return max(found)

    def _apart(self, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        return one.keys() != other.keys() or any(difference(one[key], other[key]) > self._tolerance for key in one)


def _tolerance(eps: float) -> float:
    """What rounding may do: a batch of another size is summed in another order."""
    if eps > torch.finfo(torch.float32).eps:
        return 5e-2
    return 1e-9 if eps == torch.finfo(torch.float64).eps else 1e-4


def _apart(total: float, parts: Sequence[float]) -> float:
    """How far a total is from the sum of its parts, relative to the largest of them; 0 where neither is finite."""
    added = sum(parts)
    if not (abs(total) < float("inf") and abs(added) < float("inf")):
        return 0.0
    return abs(total - added) / max(1e-6, abs(total), *map(abs, parts))


def _sums(whole: Pass, pieces: Sequence[Pass]) -> list[tuple[str, float, list[float]]]:
    """Of each term its name, the sum over the whole batch, and those over the pieces."""
    return [
        (name, total, [piece.terms[name][0] for piece in pieces if name in piece.terms])
        for name, (total, _) in whole.terms.items()
    ]


def _terms_apart(whole: Mapping[str, Pair], pieces: Sequence[Mapping[str, Pair]]) -> float:
    """How far sums and weights are from adding up, the worst of all terms."""
    names = dict.fromkeys(chain(whole, *pieces))
    nothing = (0.0, 0.0)
    return max(
        _apart(whole.get(name, nothing)[place], [piece.get(name, nothing)[place] for piece in pieces])
        for name in names
        for place in (0, 1)
    )


def _weights(name: str, whole: Pass, pieces: Sequence[Pass], split: str, sure: bool) -> str:
    """Why the weights of a term don't add up. Weights may hang on random numbers; that of a mean is always the same."""
    weight = whole.terms[name][1]
    parts = [piece.terms.get(name, (0.0, 0.0))[1] for piece in pieces]
    constant = bool(weight) and all(part == weight for part in parts)
    if _apart(weight, parts) <= 1e-6 or not (sure or constant):
        return ""
    term = f"loss()[{name!r}]" if name else "loss()"
    size = sum(piece.size for piece in pieces)
    return (
        f"{term}: the weight over {size} samples is {weight:.6g}, over pieces of {split} {sum(parts):.6g}, so the loss "
        f"{'looks like a mean, and ' if constant else ''}can't be averaged over pieces; {SUMS}, {WAY_OUT}"
    )


def _part(whole: Tensor, piece: Tensor, of: Pass, total: int, *, flat: bool) -> Tensor | None:
    """The part of a tensor of the whole batch that belongs to a piece's, found by the one axis whose lengths are as
    the numbers of samples; None where there is no such axis (padding, matrices of sample by sample, single numbers).

    Args:
        flat: an axis may also hold several rows for each sample, one sample after another.
    """
    if of.size == total:
        return whole
    if whole.ndim != piece.ndim or whole.layout != torch.strided:
        return None
    axes = [axis for axis in range(whole.ndim) if whole.shape[axis] != piece.shape[axis]]
    if len(axes) != 1:
        return None
    rows, rest = divmod(whole.shape[axes[0]], total)
    if rest or piece.shape[axes[0]] != rows * of.size or (rows > 1 and not flat):
        return None
    return whole.narrow(axes[0], of.begin * rows, of.size * rows)


def _stage_apart(stage: Stage, other: Stage, piece: Pass, total: int) -> float:
    found = [0.0]
    for path, tensor in stage.tensors.items():
        if path in other.tensors:
            part = _part(tensor, other.tensors[path], piece, total, flat=True)
            if part is not None:
                found.append(difference(part, other.tensors[path]))
    return max(found)


def _padded(whole: Pass, piece: Pass) -> bool:
    """Whether what collate() gave for a piece has other lengths than the whole batch's."""
    if not (whole.stages and piece.stages):
        return False
    others = piece.stages[0].tensors
    return any(path in others and others[path].shape[1:] != t.shape[1:] for path, t in whole.stages[0].tensors.items())


def _whole_number(whole: Pass, pieces: Sequence[Pass], tolerance: float) -> str | None:
    """The path of a single number in the model's output that is no sum over the samples."""
    for path, tensor in whole.output.items():
        if tensor.ndim == 0 and tensor.is_floating_point():
            parts = [float(piece.output[path]) for piece in pieces if path in piece.output]
            if _apart(float(tensor), parts) > tolerance:
                return path
    return None
