"""Entries of the engine's tests: each runs in every worker of a real job, and returns plain JSON."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stretto.assemble import assemble, build_template, disassemble
from stretto.checkpoint import CheckpointWriter, Snapshot, open_checkpoint, snapshot_slices
from stretto.comm.group import Group, Rendezvous
from stretto.data import BatchHandle, Feeder, Generators, Position, Sampler, seed_everything
from stretto.errors import PeerLost
from stretto.evaluation import evaluate
from stretto.launch.context import WorkerContext
from stretto.machinery import Machinery
from stretto.plan import Plan
from stretto.state import Box
from stretto.step import Onlooker, StepOutcome, Stepper
from stretto.task import load_task
from stretto.testing import conditions
from stretto.training import form_group


def state_digest(on: Machinery) -> dict[str, str]:
    """A digest of every bit that this rank holds."""
    slices = [*on.applied.export_state(), *on.optimizer.export_state()]
    found = {piece.spec.name: hashlib.sha256(piece.data.numpy().tobytes()).hexdigest() for piece in slices}
    found["generators"] = hashlib.sha256(repr(Generators.remember().to_json()).encode()).hexdigest()
    return found


def state_moments(on: Machinery) -> dict[str, list[float]]:
    """Sum and norm of every tensor that this rank holds: for models whose kernels don't repeat bit for bit."""
    slices = [*on.applied.export_state(), *on.optimizer.export_state()]
    return {piece.spec.name: [float(piece.data.double().sum()), float(piece.data.double().norm())] for piece in slices}


class Veto(Onlooker):
    """Votes one step down on one rank, ``times`` times, and notes what the state was at each vote."""

    def __init__(self, rank: int, guilty: int, step: int, times: int = 1) -> None:
        self.left = times if rank == guilty else 0
        self.at = step
        self.attempts = 0

    def vote(self, step: int) -> bool:
        """False for the step and rank in question, while there are vetoes left."""
        self.attempts += step == self.at
        if step == self.at and self.left:
            self.left -= 1
            return False
        return True


def _batches(stepper_task: Any, length: int) -> Iterator[BatchHandle]:
    return Sampler(length, stepper_task.recipe.batch, stepper_task.recipe.seed).batches(1, Position())


def _brief(outcome: StepOutcome) -> dict[str, Any]:
    return {
        "step": outcome.step,
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "weight": outcome.weight,
        "skipped": outcome.skipped,
        "learning_rate": outcome.learning_rate,
    }


def _set(payload: dict[str, Any], context: WorkerContext) -> None:
    """Plants the conditions that a test asks for."""
    if payload.get("apart"):
        conditions.separate_memory(context.rank)
    if payload.get("host_apart"):
        conditions.host_apart(context.rank)


def steps(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Runs ``num_steps`` steps; ``veto``: {rank, step, times}. Returns outcomes, state and totals of evaluate."""
    task = load_task(payload["task"], payload.get("sets", {}))
    plan = Plan.parse(payload["plan"])
    _set(payload, context)
    group = form_group(plan, context)
    dataset = task.data()["train"]
    on = assemble(task, plan, build_template(task), group)
    veto = payload.get("veto")
    observer = Veto(group.rank, veto["rank"], veto["step"], veto.get("times", 1)) if veto else None
    feeder = Feeder(dataset, task.collate, task.recipe.seed)
    stepper = Stepper(task, plan, feeder, on, observer)
    seed_everything(task.recipe.seed)
    generators = Generators.remember().to_json()
    batches = _batches(task, len(dataset))
    outcomes = []
    failed = None
    for _ in range(payload["num_steps"]):
        before = state_digest(on)
        try:
            outcomes.append(_brief(stepper.step(next(batches))))
        except RuntimeError as error:
            failed = str(error)
            break
    unused = next((place.local for name, place in on.applied.places.items() if name == "unused"), None)
    return {
        "outcomes": outcomes,
        "failed": failed,
        "untouched": failed is not None and before == state_digest(on),
        "generators_kept": generators == Generators.remember().to_json(),
        "state": state_digest(on),
        "moments": state_moments(on),
        "attempts": observer.attempts if observer else None,
        "unused": None if unused is None else unused.detach().flatten().tolist(),
        "lrs": [group["lr"] for group in on.optimizer.optimizer.param_groups],
        "totals": evaluate(task, plan, on, feeder) if len(dataset) < 100 else {},
    }


def break_asleep(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Rank 0 sleeps inside an all-reduce that the others never join; a thread of its own breaks the group."""
    group = Group(Rendezvous(context.epoch.store, 1, context.rank, context.world_size))
    if context.rank:
        time.sleep(payload["seconds"])  # neither comes nor dies: only a break can free rank 0
        return {}
    broken_at = []

    def break_later() -> None:
        time.sleep(0.3)
        broken_at.append(time.monotonic())
        group.break_()

    threading.Thread(target=break_later).start()
    try:
        group.all_reduce(torch.ones(1000))
    except PeerLost as error:
        return {"freed_after": time.monotonic() - broken_at[0], "said": str(error)}
    return {"freed_after": None}


def rebuild(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Steps under the first plan on all members, tears down, and goes on under the second on fewer of them."""
    task = load_task(payload["task"], payload.get("sets", {}))
    _set(payload, context)
    template = build_template(task)
    dataset = task.data()["train"]
    batches = _batches(task, len(dataset))
    losses = []
    folder = Path(payload["folder"])

    plan = Plan.parse(payload["plans"][0])
    on = assemble(task, plan, template, form_group(plan, context))
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on)
    for _ in range(payload["num_steps"]):
        losses.append(stepper.step(next(batches)).loss)
    writer = CheckpointWriter(folder)
    parts = snapshot_slices([*on.applied.export_state(), *on.optimizer.export_state()])
    members = context.epoch.members
    meta = {"groups": on.optimizer.hyperparameters(), "scalars": on.optimizer.scalars()}
    writer.save(Snapshot(payload["num_steps"], "t", context.member, members, context.rank == 0, parts, meta))
    writer.wait()
    on.group.barrier()
    schedule = on.schedule.state_dict() if on.schedule else None
    nominal = stepper.nominal_weight
    disassemble(on)

    plan = Plan.parse(payload["plans"][1])
    if context.rank >= plan.world_size:
        return {"losses": losses, "left": True}
    group = Group(Rendezvous(context.epoch.store, 2, context.rank, plan.world_size))
    checkpoint = open_checkpoint(next(folder.glob("step-*")))
    on = assemble(task, plan, template, group, checkpoint)
    on.optimizer.load_hyperparameters(checkpoint.meta["groups"])
    on.optimizer.import_state(checkpoint, checkpoint.meta["scalars"])
    if on.schedule is not None and schedule is not None:
        on.schedule.load_state_dict(schedule)
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on)
    stepper.nominal_weight = nominal
    for _ in range(payload["num_steps"]):
        losses.append(stepper.step(next(batches)).loss)
    return {"losses": losses, "left": False}


def first_backward(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Seconds from the moment the host forks this worker to the end of its first sharded backward."""
    plan = Plan.parse(payload["plan"])
    group = form_group(plan, context)
    task, template, dataset, prepared_at = context.prepared
    on = assemble(task, plan, template, group)
    samples = task.collate([dataset[0]])
    arguments, keywords = task.inputs(samples, on.applied.module.forward)
    with on.sync.microbatch(last=True, ghost=False):
        total, _ = task.losses(on.applied.module(*arguments, **keywords), samples)["loss"]
        torch.autograd.backward(total)
    return {"seconds": time.monotonic() - prepared_at}


def prepare(payload: dict[str, Any], report: Any) -> Any:
    """The task, its template and its data, once for all workers, and when that was done (monotonic)."""
    task = load_task(payload["task"], payload.get("sets", {}))
    return task, build_template(task), task.data()["train"], time.monotonic()


def storages(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state on this rank after a step, storages counted once.

    What all ranks share counts with this rank's part of it.
    """
    task, template, dataset, _ = context.prepared
    plan = Plan.parse(payload["plan"])
    if payload["apart"]:
        conditions.separate_memory(context.rank)
    group = form_group(plan, context)
    on = assemble(task, plan, template, group)
    template.release()
    stepper = Stepper(task, plan, Feeder(dataset, task.collate, task.recipe.seed), on)
    kept: dict[int, int] = {}

    class Count(Onlooker):
        """Looks while the gradients are there."""

        def reduced(self, step: int, sync: Any, factor: float) -> None:
            """Counts every gradient's storage."""
            for gradient in sync.gradients().values():
                if gradient is not None:
                    storage = gradient.untyped_storage()
                    kept[storage.data_ptr()] = storage.nbytes()

    stepper._observer = Count()
    stepper.step(next(_batches(task, len(dataset))))
    sharers = 1 if payload["apart"] else group.size
    for parts, holders in ((on.applied.export_state(), sharers), (on.optimizer.export_state(), 1)):
        for piece in parts:
            storage = piece.data.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // holders
    whole = sum(spec.num_bytes for spec in template.specs.values())
    return {"bytes": sum(kept.values()), "whole": 4 * whole}


def weights(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Runs ``num_steps`` steps. Returns of each the outcome and the parameter ``w`` after it, whole."""
    task = load_task(payload["task"], payload["sets"])
    plan = Plan.parse(payload["plan"])
    group = form_group(plan, context)
    dataset = task.data()["train"]
    on = assemble(task, plan, build_template(task), group)
    feeder = Feeder(dataset, task.collate, task.recipe.seed)
    stepper = Stepper(task, plan, feeder, on)
    batches = _batches(task, len(dataset))
    place = on.applied.places["w"]
    found = []
    for _ in range(payload["num_steps"]):
        outcome = stepper.step(next(batches))
        whole = torch.zeros(place.spec.shape, dtype=torch.float64)
        if place.owner:
            whole[place.box.within(Box.whole(place.spec.shape))] = place.local.detach().double()
        group.all_reduce(whole)
        state = [value for value in on.optimizer.optimizer.state.get(place.local, {}).values()]
        kinds = {str(each.dtype).removeprefix("torch.") for each in (place.local, *state) if torch.is_tensor(each)}
        scale = None if stepper.scale is None else stepper.scale.scale
        brief = {**_brief(outcome), "samples": outcome.samples}
        found.append({**brief, "w": whole.tolist(), "scale": scale, "dtypes": sorted(kinds)})
    seen = []
    on.applied.module.register_forward_hook(lambda module, _, output: seen.append(output.dtype))
    evaluate(task, plan, on, feeder)
    return {"steps": found, "compute": str(seen[0]).removeprefix("torch.")}
