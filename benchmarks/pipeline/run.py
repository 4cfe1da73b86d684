"""A step of ``pp=2`` against its schedule's theory, and against torch's own executor of pipelines.

    OMP_NUM_THREADS=1 python benchmarks/pipeline/run.py [--blocks 30] [--microbatches 8] [--out results.json]

All arms train the same model of equal blocks on the same samples in the same two processes, interleaved in paired
blocks; their losses must agree. Torch's arms are ``torch.distributed.pipelining``'s schedules over Gloo, with the model
cut by hand in the middle, plain SGD, and nothing else: no norm, no vote, no ledger.

*Theory* is the schedule carried out by arithmetic (:mod:`stretto.schedule`) with each stage's own time, which both
ranks take at the same time, so with the other core busy, without any message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from forked import run_forked
from ours import Ours
from paired import Ratio, ratio, run_blocks, table
from torch.distributed import pipelining

from stretto.assemble import build_template
from stretto.comm.group import Group
from stretto.data import Feeder, Position, Sampler
from stretto.parallel.divided import Divided
from stretto.schedule import Costs, build_schedule, simulate
from stretto.task import Task, load_task

HERE = Path(__file__).resolve().parent
SETTINGS = {"depth": 4, "width": 256, "heads": 8, "time": 64, "batch": 32}
PLANS = {
    "1f1b": "pp=2,microbatches={}",
    "interleaved": "pp=2,microbatches={},schedule=interleaved,chunks=2",
    "zero-bubble": "pp=2,microbatches={},schedule=zero-bubble",
}
TORCH = {
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
FIRST_STEPS = 3
AT_ONCE = 2  # microbatches of a stage, so that memory is as warm as in a pipeline
LOSS_TOLERANCE = 1e-4


def torchs(task: Task, how: str, microbatches: int, group: Group, gloo: Any) -> Callable[[], float]:
    """A step of torch's executor."""
    kind, chunks = TORCH[how]
    whole = build_template(task).structure
    size = len(list(whole)) // (2 * chunks)  # type: ignore[arg-type]
    stages, parameters = [], []
    for chunk in range(chunks):
        index = chunk * 2 + group.rank
        part = torch.nn.Sequential(*list(whole)[index * size : (index + 1) * size])  # type: ignore[arg-type]
        parameters += list(part.parameters())
        stages.append(pipelining.PipelineStage(part, index, 2 * chunks, torch.device("cpu"), group=gloo))
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    batch_size = task.recipe.batch

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return task.losses(output, (None, target))["loss"][0] / batch_size

    pipeline = kind(stages[0] if chunks == 1 else stages, microbatches, loss_fn=loss, scale_grads=False)
    dataset = task.data()["train"]
    feeder = Feeder(dataset, task.collate, task.recipe.seed)
    batches = Sampler(len(dataset), batch_size, task.recipe.seed).batches(1, Position())

    def step() -> float:
        batch = next(batches)
        inputs, targets = feeder.get(batch.ids, batch.start.epoch)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if group.rank == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=targets, losses=losses)
        optimizer.step()
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(total, group=gloo)
        return float(total)

    return step


def stage_seconds(ours: Ours, group: Group) -> list[list[float]]:
    """Forward and backward of each stage, in seconds, while the other rank runs its own; without any message."""
    applied = ours.on.applied
    assert isinstance(applied, Divided)
    (program,) = [one for key, one in applied._programs.items() if key[0]]
    task, size = ours.stepper.task, ours.stepper.task.recipe.batch // ours.plan.microbatches
    samples = task.collate([task.data()["train"][index] for index in range(size)])
    found: dict[int, list[float]] = {}
    group.barrier()
    for stage, portion in program.portions.items():
        waiting, forward, backward = [], 0.0, 0.0
        for _ in range(AT_ONCE):
            arriving = [torch.randn(program.shapes[n].sizes).requires_grad_() for n in portion.arriving]
            began = time.perf_counter()
            result = portion.run([samples[0]], arriving)
            if stage == program.stages.count - 1:
                roots = [task.losses(result.output, samples)["loss"][0] / size]
            else:
                roots = list(result.leaving.values())
            forward += time.perf_counter() - began
            waiting.append(roots)
        for roots in waiting:
            gradients = [torch.ones_like(root) for root in roots]
            began = time.perf_counter()
            torch.autograd.backward(roots, gradients)
            backward += time.perf_counter() - began
        found[stage] = [forward / AT_ONCE, backward / AT_ONCE]
    ours.on.sync.begin()
    group.barrier()
    every: dict[int, list[float]] = {}
    for theirs in group.gather_json({str(stage): both for stage, both in found.items()}):
        every |= {int(stage): both for stage, both in theirs.items()}
    return [every[stage] for stage in sorted(every)]


def against_theory(ours: Ours, group: Group, rounds: int) -> dict[str, Any]:
    """The pipeline's part of a step (all microbatches, forward and backward) over the schedule's theory.

    A core's speed here changes by a fifth from second to second, so the stages' times are taken straight before and
    straight after each step, and the median of the steps' ratios counts.
    """
    applied = ours.on.applied
    assert isinstance(applied, Divided)
    schedule = build_schedule(ours.plan.schedule, applied._flow, ours.plan.microbatches)
    measured, theory = [], []
    before = stage_seconds(ours, group)
    for _ in range(rounds):
        ours()
        spans = [span for span in ours.lanes.steps[-1][1] if span.microbatch is not None]
        both = group.gather_json([spans[0].start, spans[-1].end])
        measured.append(max(end for _, end in both) - min(begin for begin, _ in both))
        after = stage_seconds(ours, group)
        costs = [[(b + a) / 2 for b, a in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
        forward, backward = (tuple(cost[at] for cost in costs) for at in (0, 1))
        theory.append(simulate(schedule, Costs(forward, backward, (0.5,) * len(costs))).seconds)
        before = after
    ratios = sorted(m / t for m, t in zip(measured, theory, strict=True))
    return {
        "milliseconds": 1000 * statistics.median(measured),
        "theory_milliseconds": 1000 * statistics.median(theory),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _drop(step: Callable[[], float]) -> None:
    step()


def main() -> None:
    """Runs the arms and prints the tables; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=40, help="steps against theory, for each schedule")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def body(group: Group) -> None:
        task, gloo = load_task(HERE / "task.py", SETTINGS), dist.new_group(backend="gloo")
        arms: dict[str, Callable[[], float]] = {}
        for how, plan in PLANS.items():
            arms[f"torch, {how}"] = torchs(task, how, options.microbatches, group, gloo)
            arms[how] = Ours(task, plan.format(options.microbatches), group)
        arms["torch, 1f1b, again"] = torchs(task, "1f1b", options.microbatches, group, gloo)
        losses = {name: [step() for _ in range(FIRST_STEPS)][-1] for name, step in arms.items()}
        if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * min(losses.values()):
            raise SystemExit(f"the arms do different work; losses after {FIRST_STEPS} steps: {losses}")
        theory = {how: against_theory(arms[how], group, options.rounds) for how in PLANS}  # type: ignore[arg-type]
        timed = {name: partial(_drop, step) for name, step in arms.items()}
        times = run_blocks(timed, options.blocks, 1, group.barrier)
        ratios: list[Ratio] = [ratio("torch, 1f1b, again", "torch, 1f1b", times)]
        ratios += [ratio(how, f"torch, {how}", times) for how in PLANS]
        ratios += [ratio(how, "1f1b", times) for how in PLANS if how != "1f1b"]
        if group.rank == 0:
            print(table(ratios, times))
            for how, found in theory.items():
                low, _, high = statistics.quantiles(found["ratios"], n=4)
                spread = f"{found['ratio']:.3f} (half of them {low:.3f} to {high:.3f})"
                took = f"{found['milliseconds']:.1f} ms, theory {found['theory_milliseconds']:.1f} ms"
                print(f"{how}: {took}, ratio {spread}", flush=True)
            if options.out:
                head = {"workers": 2, "torch": torch.__version__, "settings": SETTINGS, "losses": losses}
                found = {"ratios": [one.to_json() for one in ratios], "theory": theory}
                options.out.write_text(json.dumps({**head, **found}, indent=1) + "\n")

    run_forked(2, body)


if __name__ == "__main__":
    main()
