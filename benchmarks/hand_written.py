"""What a careful engineer writes by hand with torch alone: one training step of DDP, and one of FSDP2.

Both reduce the loss as stretto does (sum over sum of weights of the global batch) and clip by the global norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from stretto.comm.group import Group
from stretto.task import Params, Task


def samples(dataset: Dataset[Any], batch: int, group: Group) -> Iterator[Any]:
    """This rank's batches, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, group.size, group.rank, seed=0)
    loader = DataLoader(dataset, batch_size=batch // group.size, sampler=sampler)
    while True:
        yield from loader


def loop(task: Task, model: nn.Module, batches: Iterator[Any], group: Group, factor: float) -> Callable[[], None]:
    """The step that both share; ``factor`` undoes the averaging that both do."""
    optimizer = task.optimizer(Params(model.named_parameters()))
    schedule = task.schedule(optimizer)
    clip = task.recipe.clip

    def step() -> None:
        batch = next(batches)
        loss, weight = task.losses(model(batch[0]), batch)["loss"]
        totals = torch.stack([loss.detach(), weight.to(loss.dtype)])
        dist.all_reduce(totals)
        (loss * (factor / totals[1])).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        float(totals[0] / totals[1])

    return step


def ddp(task: Task, dataset: Dataset[Any], group: Group) -> Callable[[], None]:
    """A step of DistributedDataParallel, which averages: hence the factor of the world size."""
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model())
    return loop(task, model, samples(dataset, task.recipe.batch, group), group, float(group.size))


def fsdp2(task: Task, dataset: Dataset[Any], group: Group) -> Callable[[], None]:
    """A step of FSDP2, block by block, as its tutorial has it."""
    torch.manual_seed(0)
    model = shard(task.model(), group)
    return loop(task, model, samples(dataset, task.recipe.batch, group), group, float(group.size))


def shard(model: nn.Module, group: Group) -> nn.Module:
    """``fully_shard`` on each block and on the root."""
    mesh = DeviceMesh.from_group(group.process_group, "cpu")
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
