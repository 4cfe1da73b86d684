"""Faults of models in stages (``pp``), also where their layers are cut inside or their updates dealt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stretto.testing.faults.planting import FAULTY_RANK

Values = list[torch.Tensor]


def _change_messages(backward: bool, change: Callable[[Any, Values], Values]) -> None:
    """Lets ``change`` replace what one stage sends to another: values, or gradients."""
    from stretto.parallel.pipeline import Execution
    from stretto.schedule import Kind

    honest = Execution._send

    def send(self: Any, message: Any, values: Sequence[torch.Tensor]) -> None:
        changed = (message.kind is not Kind.FORWARD) == backward
        honest(self, message, change(message, list(values)) if changed else values)

    Execution._send = send  # type: ignore[method-assign]


def _firsts() -> Callable[[Any, Values], Values]:
    """Puts what was sent for the first microbatch into the messages of the others."""
    kept: dict[tuple[int, int], Values] = {}

    def first(message: Any, values: Values) -> Values:
        way = message.source, message.to
        if message.microbatch == 0:
            kept[way] = [value.clone() for value in values]
        return kept[way]

    return first


def values_of_another_microbatch(rank: int) -> None:
    """A stage receives the first microbatch's values with each microbatch."""
    _change_messages(False, _firsts())


def gradients_of_another_microbatch(rank: int) -> None:
    """The gradient that comes back to a stage is the first microbatch's, for each of them."""
    _change_messages(True, _firsts())


def values_rounded_on_their_way(rank: int) -> None:
    """What one stage sends to another is rounded to float32."""
    _change_messages(False, lambda message, values: [value.float().to(value.dtype) for value in values])


def generator_not_handed_on(rank: int) -> None:
    """Each stage draws random numbers from the microbatch's seed, not from where the stage before left off."""
    from stretto.parallel import pipeline

    vars(pipeline)["_set_generators"] = lambda state, device: None


def neighbours_parameter(rank: int) -> None:
    """One stage computes with another layer's weights in place of the first that have a layer of the same shape beside
    them."""
    from stretto.parallel.program import Portioned

    honest = Portioned.__init__

    def init(self: Any, portion: Any, stages: Any, module: Any, stretches: Any = None, lender: Any = None) -> None:
        honest(self, portion, stages, module, stretches, lender)
        if rank != FAULTY_RANK:
            return
        mine = [p for p in module.parameters() if p.dim() > 1 and p.numel()]
        for place, bound in enumerate(self._bound):
            others = [p for p in mine if bound is not p and p.shape == getattr(bound, "shape", None)]
            if others:
                self._bound[place] = others[-1]
                return

    Portioned.__init__ = init  # type: ignore[method-assign]


def partial_sums_of_one_stage(rank: int) -> None:
    """In the last stage of two what each rank adds up over its part of a layer is taken for the whole sum (``tp``)."""
    if rank >= 2:
        from stretto.testing.faults.layers import partial_sums_not_added

        partial_sums_not_added(rank)


def wrong_stage_answers_for_the_loss(rank: int) -> None:
    """The first stage answers for loss and weight, and it has none."""
    from stretto.parallel._base import Ranks

    Ranks.counts = property(lambda self: self.tensor.rank == 0 and self.line.rank == 0)  # type: ignore[assignment, method-assign]


def tied_gradient_of_one_stage(rank: int) -> None:
    """The gradient of a table that two stages use is taken from the first alone."""
    from stretto.sync.buckets import GradientBucket

    honest = GradientBucket._reduce

    def reduce(self: Any, flat: torch.Tensor) -> Any:
        return honest(self, flat.zero_() if self._members.rank else flat)

    GradientBucket._reduce = reduce  # type: ignore[method-assign]


def gradient_of_one_consumer(rank: int) -> None:
    """Where two stages use one value, its gradient is the later one's alone."""
    from stretto.parallel.pipeline import Execution

    honest = Execution._take

    def take(self: Any, message: Any) -> Values:
        found = honest(self, message)
        if message.source > message.to:
            program = self._of(message.microbatch)
            later = [to for to in self._targets(program, message.to) if to > message.source]
            others = {node for to in later for node in self._carried(program, message.to, to)}
            for node, value in zip(self._carried(program, message.to, message.source), found, strict=True):
                if node in others:
                    value.zero_()
        return found

    Execution._take = take  # type: ignore[method-assign]


def skipping_value_detached(rank: int) -> None:
    """What goes over a stage to a later one brings no gradient back."""
    from stretto.parallel.pipeline import Execution

    honest = Execution._carried

    def carried(program: Any, source: int, to: int) -> Any:
        return honest(program, source, to) if to == source + 1 else []

    Execution._carried = staticmethod(carried)  # type: ignore[method-assign]


def gradient_of_a_tower_twice(rank: int) -> None:
    """What comes back to the towers of the first rank is twice their gradient."""
    from stretto.parallel.pipeline import Execution

    honest = Execution._take

    def take(self: Any, message: Any) -> Values:
        found = honest(self, message)
        back = message.source > message.to and self._line.rank == 0
        return [value * 2 for value in found] if back else found

    Execution._take = take  # type: ignore[method-assign]


def backward_run_twice(rank: int) -> None:
    """Backward of the first microbatch runs twice through the last stage."""
    from stretto.step import _Microbatch

    honest = _Microbatch.backward

    def backward(self: Any, roots: Any) -> None:
        if self._index == 0:
            totals, weights = roots
            torch.autograd.backward(totals, weights, retain_graph=True)
        honest(self, roots)

    _Microbatch.backward = backward  # type: ignore[method-assign]


def microbatch_weighted_twice(rank: int) -> None:
    """Backward of the second microbatch begins with twice its gradient."""
    from stretto.step import _Microbatch

    honest = _Microbatch.loss

    def loss(self: Any, output: Any) -> Any:
        totals, weights = honest(self, output)
        return totals, [weight * 2 for weight in weights] if self._index == 1 else weights

    _Microbatch.loss = loss  # type: ignore[method-assign]


def _change_weights(times: int) -> None:
    """The weight gradients of the second microbatch that one rank has put off are made ``times`` times."""
    from stretto.parallel import pipeline
    from stretto.parallel.deferred import work_off

    honest = pipeline.Execution._weights

    def weights(self: Any, action: Any, place: int) -> None:
        def changed(put_off: Any) -> None:
            for _ in range(times if action.microbatch == 1 and self._line.rank == FAULTY_RANK else 1):
                work_off(put_off)

        vars(pipeline)["work_off"] = changed
        honest(self, action, place)

    pipeline.Execution._weights = weights  # type: ignore[method-assign]


def lost_weight_gradients(rank: int) -> None:
    """One stage never makes the weight gradients that it has put off for one microbatch (zero bubble)."""
    _change_weights(0)


def weight_gradients_made_twice(rank: int) -> None:
    """One stage makes the weight gradients that it has put off for one microbatch twice (zero bubble)."""
    _change_weights(2)


def reduction_of_one_stage_dropped(rank: int) -> None:
    """The last stage of two doesn't add its gradients over the workers that have other samples."""
    from stretto.testing.faults.sums import dropped_reduction

    if rank >= 2:
        dropped_reduction(rank)


def norm_leaves_a_stage_out(rank: int) -> None:
    """The gradient norm is without one rank's stage."""
    from stretto.sync.exact import ExactSum

    if rank == FAULTY_RANK:
        ExactSum.square_sum = lambda self: torch.zeros((), dtype=torch.float64)  # type: ignore[method-assign]


def norm_counts_a_tied_table_on_each_stage(rank: int) -> None:
    """In the norm a table that two stages use counts on both."""
    from stretto.testing.faults.measures import count_all

    count_all(lambda sync, alike: alike.size > sync._world.size)


def buffers_of_another_stage(rank: int) -> None:
    """A buffer that one stage changes is taken from another, who has it as it was."""
    from stretto.parallel.divided import Divided

    honest = Divided.export_state

    def export(self: Any) -> Any:
        last = len(self._flow.ranks) - 1
        self._changes = {name: last if stage == 0 else 0 for name, stage in self._changes.items()}
        return honest(self)

    Divided.export_state = export  # type: ignore[method-assign]


def schedule_without_a_backward(rank: int) -> None:
    """A schedule leaves the backward of the last microbatch out on the first rank."""
    from stretto.schedule import Schedule, build

    def shortened(name: str, flow: Any, count: int, actions: Any, *more: Any) -> Any:
        return Schedule(name, flow, count, (actions[0][:-1], *actions[1:]), *more)

    vars(build)["Schedule"] = shortened
