"""The peers, each as its documentation has it: torch alone, Accelerate, DeepSpeed.

Bucket and prefetch settings are theirs, and nothing is offloaded. What differs from the defaults says why.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
from common import Case, Peer, as_default, fresh_model, stepping
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stretto.task import Params


class _Torch:
    """What both peers of torch's own do after forward."""

    model: nn.Module
    _clip: float | None
    _optimizer: Any
    _schedule: Any

    def backward(self, loss: Tensor) -> None:
        """See :class:`Peer`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, last: bool) -> None:
        """See :class:`Peer`."""
        if not last:
            return
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._schedule is not None:
            self._schedule.step()


class ShardedOptimizer(_Torch):
    """Stage 1 by torch alone: DistributedDataParallel and ZeroRedundancyOptimizer.

    Gradients lie in DDP's buckets and parameters in the optimizer's, so that nothing is copied for a message. Its
    overlap of updates with DDP asks for NCCL, and leaves no moment for clipping.
    """

    def __init__(self, case: Case) -> None:
        module = fresh_model(case.task)
        self._clip = case.task.recipe.clip
        plain = case.task.optimizer(Params(module.named_parameters()))
        self.model = DistributedDataParallel(module, process_group=case.gloo, gradient_as_bucket_view=True)
        self._optimizer = ZeroRedundancyOptimizer(
            [dict(group) for group in plain.param_groups],
            optimizer_class=type(plain),
            process_group=case.gloo,
            parameters_as_bucket_view=True,
            **{key: value for key, value in plain.defaults.items() if key in inspect.signature(type(plain)).parameters},
        )
        self._schedule = case.task.schedule(self._optimizer)
        self.factor = float(case.group.size)

    def microbatch(self, last: bool) -> Any:
        """See :class:`Peer`."""
        return nullcontext() if last else self.model.no_sync()


class FSDP2(_Torch):
    """Stages 2 and 3 by torch alone: ``fully_shard`` on each block and on the root, as its tutorial has it.

    At stage 2 the weights stay whole from their first gather in a step to the end of its last backward.
    """

    def __init__(self, case: Case) -> None:
        self._stage, self._clip = case.stage, case.task.recipe.clip
        self._module = fresh_model(case.task)
        mesh = DeviceMesh.from_group(case.gloo, "cpu")
        for unit in (*blocks(self._module), self._module):
            fully_shard(unit, mesh=mesh, reshard_after_forward=case.stage == 3)
        self.model = self._module
        self._optimizer = case.task.optimizer(Params(self._module.named_parameters()))
        self._schedule = case.task.schedule(self._optimizer)
        self.factor = float(case.group.size)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """See :class:`Peer`."""
        assert isinstance(self._module, FSDPModule)
        self._module.set_requires_gradient_sync(last)
        self._module.set_is_last_backward(last)
        if self._stage == 2:
            self._module.set_reshard_after_backward(last)
        yield


class Accelerate:
    """Stages 2 and 3 by Accelerate's FSDP2 plugin.

    Accelerate takes the plugin for accelerators only, and falls back to DDP on CPUs without a word; so its state is
    told by hand that this is FSDP. From there on everything is its own code.
    """

    def __init__(self, case: Case) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self._clip = case.task.recipe.clip
        module = fresh_model(case.task)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=case.stage == 3,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(blocks(module)[0]).__name__],
            cpu_ram_efficient_loading=False,
        )
        # It looks into torchrun's variables to see that there is more than one process.
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(case.group.rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(case.group.size)
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # else it chooses anew, for all arms
        self._accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=case.pieces, step_scheduler_with_optimizer=False
        )
        self._accelerator.state.distributed_type = DistributedType.FSDP
        self._accelerator.state.fsdp_plugin = plugin
        optimizer = case.task.optimizer(Params(module.named_parameters()))
        self._schedule = case.task.schedule(optimizer)
        self.model, self._optimizer = self._accelerator.prepare(module, optimizer)
        assert isinstance(self.model, FSDPModule)
        self.factor = float(case.group.size)
        self._pieces = case.pieces

    def microbatch(self, last: bool) -> Any:
        """See :class:`Peer`."""
        return self._accelerator.accumulate(self.model)

    def backward(self, loss: Tensor) -> None:
        """See :class:`Peer`; it divides by the microbatches."""
        self._accelerator.backward(loss * self._pieces)

    def update(self, last: bool) -> None:
        """See :class:`Peer`; its optimizer does nothing before the last microbatch."""
        assert self._accelerator.sync_gradients == last
        if last and self._clip is not None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if last and self._schedule is not None:
            self._schedule.step()


class DeepSpeed:
    """Stages 1, 2 and 3 by DeepSpeed, with its own defaults for buckets and prefetching."""

    def __init__(self, case: Case) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_RANK"] = str(case.group.rank)
        logging.disable(logging.WARNING)
        import deepspeed

        # Its compiled shared-memory all-reduce serves inference only; not to compile it changes no training step.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        module = fresh_model(case.task)
        optimizer = case.task.optimizer(Params(module.named_parameters()))
        clip = case.task.recipe.clip
        config = {
            "train_micro_batch_size_per_gpu": case.task.recipe.batch // case.group.size // case.pieces,
            "gradient_accumulation_steps": case.pieces,
            "gradient_clipping": 0.0 if clip is None else clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": case.stage},
        }
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=case.task.schedule(optimizer),
            config=config,
            dist_init_required=False,
        )
        self.model = self._engine
        self.factor = float(case.group.size * case.pieces)

    def microbatch(self, last: bool) -> Any:
        """See :class:`Peer`; it counts them itself."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """See :class:`Peer`; it divides by the microbatches."""
        self._engine.backward(loss)

    def update(self, last: bool) -> None:
        """See :class:`Peer`; it does nothing before the last microbatch."""
        assert self._engine.is_gradient_accumulation_boundary() == last
        self._engine.step()


def blocks(module: nn.Module) -> list[nn.Module]:
    """The layers that repeat: what the peers wrap one by one."""
    return [block for child in module.modules() if isinstance(child, nn.ModuleList) for block in child]


# Each with its package, and the first of a stage stands twice as the control.
PEERS: Final[Mapping[int, tuple[tuple[str, str, Callable[[Case], Peer]], ...]]] = MappingProxyType(
    {
        1: (("DDP + ZeroRedundancyOptimizer", "torch", ShardedOptimizer), ("DeepSpeed ZeRO-1", "deepspeed", DeepSpeed)),
        2: (
            ("FSDP2, weights kept", "torch", FSDP2),
            ("Accelerate FSDP2, weights kept", "accelerate", Accelerate),
            ("DeepSpeed ZeRO-2", "deepspeed", DeepSpeed),
        ),
        3: (
            ("FSDP2", "torch", FSDP2),
            ("Accelerate FSDP2", "accelerate", Accelerate),
            ("DeepSpeed ZeRO-3", "deepspeed", DeepSpeed),
        ),
    }
)


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build(make: Callable[[Case], Peer], case: Case) -> Callable[[], float]:
    """A step of the peer. Every rank must call it."""
    with as_default(case.gloo):
        peer = make(case)
    return stepping(peer, case)
