"""A process group of torch over the memory that the members of one host share.

It is a Python subclass of ``ProcessGroup``, which FSDP2, DTensor, DDP and plain ``torch.distributed`` calls run on.
Against Gloo over loopback it saves the sockets' copies, and its reduce-scatter moves one part to each rank instead of
all to all. CPU tensors only.

A call with ``async_op`` makes what steps it can without waiting; ``wait()``, or the next call on the group, makes the
rest. Calls end in the order in which they were made, on every rank the same. Two threads that call at once are served
one after the other, but nothing keeps their order alike on all ranks: a second thread needs its own group.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from stretto.comm import shm_collectives as steps_of
from stretto.comm.shm_collectives import COMBINE, Steps
from stretto.comm.shm_segment import Lost, Segment, form_segment

BACKEND: Final = "stretto_shm"

Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # torch calls each method in one way; its stubs list overloads that none takes


class SharedMemoryGroup(_ProcessGroup):  # type: ignore[misc]
    """The group over ``segment``; every collective must be called by all members, in the same order.

    Any failure ends the group on this member, and the others' next wait too: a collective that stopped half-way can't
    be taken up again. :meth:`break_` does that from another thread.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.rank, segment.size)
        self._segment = segment
        self._calls: deque[_Call] = deque()
        self._count = 0
        self._lock = threading.Lock()
        self._name = ""
        self._description = ""

    # What torch asks of a group besides collectives. The names are torch's.

    @property
    def group_name(self) -> str:
        """The name in torch's world."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What torch's logs call it."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        """For ``name()`` and torch's logs."""
        return BACKEND

    def shutdown(self) -> None:
        """Leaves the group; whoever waits for this member in a later call is told."""
        self.break_("it has closed the group")

    def abort(self) -> None:
        """As :meth:`break_`."""
        self.break_()

    def break_(self, why: str = "the group was broken") -> None:
        """Ends every call on this group, now and later, with Lost. Any thread may call it, at any time."""
        self._segment.leave(Lost(f"rank {self.rank()}: {why}"))

    def under_way(self) -> tuple[str, int]:
        """The call that this member has begun and others have not, and how many it has begun. Any thread may ask."""
        return self._segment.under_way(), self._count

    def check_peers(self) -> None:
        """Raises Lost where another member has died or left."""
        self._segment.check_peers()

    # The collectives, with torch's names and arguments.

    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns when every member has come."""
        return self._start("barrier", "", steps_of.barrier())

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """``tensors[0]`` of ``opts.rootRank``, in place."""
        flat = _Flat([_one(tensors)])
        steps = steps_of.broadcast(self._segment, flat[0], opts.rootRank)
        return self._start("broadcast", f"{_size(flat)} from rank {opts.rootRank}", steps, flat)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """``tensors[0]`` of everyone, combined, in place."""
        return self.allreduce_coalesced([_one(tensors)], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Each tensor as in ``allreduce``."""
        how = _operation(opts)
        work: dist.Work | None = None
        for tensor in tensors:
            flat = _Flat([tensor])
            steps = steps_of.all_reduce(self._segment, flat[0], how)
            work = self._start("all_reduce", f"{_size(flat)}, {how}", steps, flat)
        return work or self.barrier()

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """``tensors[0]`` of everyone, combined, into that of ``opts.rootRank``."""
        how = _operation(opts)
        flat = _Flat([_one(tensors)])
        steps = steps_of.reduce(self._segment, flat[0], opts.rootRank, how)
        return self._start("reduce", f"{_size(flat)}, {how}, to rank {opts.rootRank}", steps, flat)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """``inputs[0]`` of everyone into ``outputs[0][rank]``; sizes may differ from rank to rank."""
        return self._all_gather(list(outputs[0]), _one(inputs))

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        """``own`` of everyone into ``output``, one after another."""
        return self.all_gather_single_coalesced([output], [own])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Each pair as in ``all_gather_single``."""
        work: dist.Work | None = None
        for output, own in zip(outputs, inputs, strict=True):
            whole = _Flat([output])
            work = self._all_gather(self._rows(whole[0], own.numel()), own, whole)
        return work or self.barrier()

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """``inputs[0][rank]`` of everyone, combined, into ``outputs[0]`` of rank; sizes may differ."""
        return self._reduce_scatter(_one(outputs), _Flat(inputs[0]), opts)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        """``whole`` of everyone, combined, cut into equal parts, one for each rank's ``output``."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Each pair as in ``reduce_scatter_single``."""
        work: dist.Work | None = None
        for output, whole in zip(outputs, inputs, strict=True):
            work = self._reduce_scatter(output, self._rows(_Flat([whole])[0], output.numel()), opts)
        return work or self.barrier()

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        """``inputs[0][rank]`` of ``opts.rootRank`` into ``outputs[0]`` of rank; all of one size."""
        output = _Flat([_one(outputs)])
        parts = _Flat(inputs[0]) if self.rank() == opts.rootRank else []
        if any(part.numel() != output[0].numel() for part in parts):
            raise ValueError("scatter: every part must have as many elements as the output")
        steps = steps_of.scatter(self._segment, output[0], parts, opts.rootRank)
        return self._start("scatter", f"{_size(output)} from rank {opts.rootRank}", steps, output)

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> dist.Work:
        """Parts of ``whole`` to each rank, parts from each rank into ``output``; equal ones only."""
        if len(set(output_sizes)) > 1 or len(set(input_sizes)) > 1 or output.numel() != whole.numel():
            raise NotImplementedError(f"{BACKEND}: all_to_all of unequal parts; use a group of backend gloo for it")
        target, share = _Flat([output]), whole.numel() // self.size()
        outputs, inputs = self._rows(target[0], share), self._rows(_Flat([whole])[0], share)
        return self._start("all_to_all", _size(target), steps_of.all_to_all(self._segment, outputs, inputs), target)

    _allgather_base = all_gather_single  # torch before 2.13 calls them so
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(
            f"{BACKEND} has no point-to-point calls, gather, all_to_all of lists or grouped starts; "
            "use dist.new_group(backend='gloo') for them"
        )

    send = recv = recv_anysource = gather = alltoall = allgather_coalesced = _refuse
    _start_coalescing = _end_coalescing = split_group = merge_remote_group = _refuse

    # How a call is made.

    def _all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor, whole: _Flat | None = None) -> dist.Work:
        targets, source = _Flat(outputs), _Flat([own])
        sizes = [target.numel() for target in targets]
        if len(sizes) != self.size() or sizes[self.rank()] != own.numel() or outputs[0].dtype != own.dtype:
            raise ValueError(
                f"all_gather: {own.numel()} elements of {own.dtype} on rank {self.rank()} don't fit outputs of "
                f"{sizes} elements of {outputs[0].dtype}"
            )
        steps = steps_of.all_gather(self._segment, targets, source[0])
        return self._start("all_gather", _size(targets), steps, whole or targets)

    def _reduce_scatter(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> dist.Work:
        how = _operation(opts)
        target = _Flat([output])
        sizes = [part.numel() for part in inputs]
        if len(sizes) != self.size() or sizes[self.rank()] != output.numel() or inputs[0].dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter: parts of {sizes} elements of {inputs[0].dtype} don't fit an output of "
                f"{output.numel()} elements of {output.dtype} on rank {self.rank()}"
            )
        steps = steps_of.reduce_scatter(self._segment, target[0], inputs, how)
        return self._start("reduce_scatter", f"{_size(inputs)}, {how}", steps, target)

    def _rows(self, flat: torch.Tensor, share: int) -> list[torch.Tensor]:
        if flat.numel() != share * self.size():
            raise ValueError(f"{flat.numel()} elements are not {self.size()} times {share}, one part for each rank")
        return list(torch.split(flat, share)) if share else [flat] * self.size()

    def _start(self, kind: str, what: str, steps: Steps, flat: _Flat | None = None) -> dist.Work:
        with self._lock:
            self._segment.check_open()
            self._count += 1
            call = _Call(self, f"{kind} no. {self._count}" + f" ({what})" * bool(what), steps, flat)
            self._calls.append(call)
            self._advance(None)
        return call

    def finish(self, call: _Call) -> None:
        """Makes all steps of ``call``, and of those before it."""
        while not call.done:
            with self._lock:
                self._segment.check_open()
                self._advance(call)

    def poll(self) -> None:
        """Makes what steps can be made without waiting."""
        with self._lock:
            self._advance(None)

    def _advance(self, wanted: _Call | None) -> None:
        """Makes steps of the calls in their order: without waiting, or until ``wanted`` is done."""
        try:
            while self._calls and not (wanted is not None and wanted.done):
                head = self._calls[0]
                if not self._step(head, wait=wanted is not None):
                    return
                if head.done:
                    self._calls.popleft()
        except BaseException as error:
            self._calls.clear()
            self._segment.leave(error if isinstance(error, RuntimeError) else Lost(f"rank {self.rank()}: {error!r}"))
            raise

    def _step(self, call: _Call, wait: bool) -> bool:
        """Reads the step that ``call`` has posted, if any, and posts the next; False where the others aren't there."""
        segment = self._segment
        if call.posted:
            if not wait and not segment.ready():
                return False
            segment.wait(call.says)
        if next(call.steps, _END) is _END:
            call.finish()
        else:
            segment.post(call.says)
            call.posted = True
        return True


_END: Final = object()


class Writing(dist.Work):
    """A collective that writes ``flat``; whoever derives from it says how it is waited for."""

    def __init__(self, flat: _Flat | None) -> None:
        super().__init__()
        self._flat = flat

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return [] if self._flat is None else self._flat.originals

    def get_future(self) -> Any:
        """A future that is done: nothing works in the background, so this waits."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


class _Call(Writing):
    """One collective under way."""

    def __init__(self, group: SharedMemoryGroup, says: str, steps: Steps, flat: _Flat | None) -> None:
        super().__init__(flat)
        self.says = says.encode()[:256]
        self.steps = steps
        self.posted = False
        self.done = False
        self._group = group

    def finish(self) -> None:
        """All steps are made."""
        if self._flat is not None:
            self._flat.copy_back()
        self.done = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes what is left of this call and of those before it; the group's own time limit holds."""
        self._group.finish(self)
        return True

    def is_completed(self) -> bool:
        """Whether it is done; makes steps that need no waiting."""
        if not self.done:
            self._group.poll()
        return self.done

    def is_success(self) -> bool:
        """Whether it is done: a call that fails raises."""
        return self.done


class _Flat(list[torch.Tensor]):
    """Tensors as flat memory, without their history; one that lies scattered in memory is copied, and back at the end.

    ``.data``, not ``detach()``: as with other backends, what arrives doesn't count as a change that autograd sees.
    """

    def __init__(self, tensors: Tensors) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise NotImplementedError(f"{BACKEND} takes dense CPU tensors, not {tensor.layout} on {tensor.device}")
        self.originals = list(tensors)
        # as_strided, since a tensor of one element counts as contiguous with any stride
        super().__init__(tensor.data.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors)

    def copy_back(self) -> None:
        """Writes copies back to where the originals are scattered."""
        for flat, original in zip(self, self.originals, strict=True):
            if flat.data_ptr() != original.data_ptr():
                original.data.copy_(flat.view(original.shape))


def form_shared_memory_group(options: Any, _: Any = None) -> SharedMemoryGroup:
    """What ``dist.Backend.register_backend`` wants: makes the group that torch describes. Every member must call it.

    Raises:
        Unavailable: on every member alike, where one of them can't share memory.
        Lost: a member did not come in time.
    """
    timeout = options.timeout.total_seconds()
    return SharedMemoryGroup(form_segment(options.store, options.group_rank, options.group_size, timeout))


def _one(tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise NotImplementedError(f"{BACKEND}: {len(tensors)} tensors in one call; one is expected")
    return tensors[0]


def _operation(opts: Any) -> str:
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for how in COMBINE:
        if asked == getattr(dist.ReduceOp, how.upper()):
            return how
    raise NotImplementedError(f"{BACKEND} reduces by {', '.join(COMBINE)}, not by {asked}")


def _size(tensors: Tensors) -> str:
    """Bytes and type, for messages and for comparing calls."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    shown = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    if len(shown) > 100:
        shown = f"{sum(sizes)} in {len(sizes)} parts #{zlib.crc32(shown.encode()):08x}"
    return f"{shown} bytes of {str(tensors[0].dtype).removeprefix('torch.')}"
