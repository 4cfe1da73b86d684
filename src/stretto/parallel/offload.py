"""What the device has no room for lies on the host (ZeRO-Offload, arXiv 2101.06840).

``optimizer``: what is trained (each place's ``local``) and the optimizer's state lie there and are updated there;
gradients of this rank's part go down, and forward's weights are filled anew from it.

``activations``: what forward keeps for backward goes there and comes back when backward asks for it. Whole storages are
moved, so what is saved twice, or as several views of one memory, is moved once each way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from stretto.errors import Refused
from stretto.parallel._base import Manner, Place

HOST: Final = torch.device("cpu")
LEAST_BYTES: Final = 64 * 1024
"""Smaller ones stay: a move costs more than they hold."""


def is_host(device: torch.device) -> bool:
    """Whether there is nowhere to move anything to."""
    return device.type == HOST.type


class Offloaded:
    """What of a layout lies on the host.

    Args:
        module: the layout's copy of the model.

    ``notes``: what there is to say about it.
    """

    def __init__(self, module: nn.Module, manner: Manner, device: torch.device) -> None:
        self._module, self._device = module, device
        self.notes: tuple[str, ...] = ()
        self.activations = manner.offload in ("activations", "all")
        self.optimizer = manner.offload in ("optimizer", "all")
        if manner.offload != "none" and is_host(device):
            self.activations = self.optimizer = False
            self.notes = (
                f"offload={manner.offload} is inactive: the workers' device is the host ({device.type}), so there is "
                "nowhere to move anything to",
            )
        if self.optimizer:
            said = "what trains and the optimizer's state lie on the host and are updated there"
            self.notes += (f"offload={manner.offload}: {said}",)
        if self.activations:
            said = f"what forward keeps for backward waits on the host, but for what is under {LEAST_BYTES:,} bytes"
            kept = "; what recompute=selective keeps of layers stays" if manner.recompute == "selective" else ""
            self.notes += (f"offload={manner.offload}: {said}{kept}",)
        self._hosted: list[Place] = []
        self._met: list[tuple[int, int]] | None = None
        self._proved = False

    # ---- the optimizer

    def places(self, places: dict[str, Place]) -> dict[str, Place]:
        """The places, with what trains on the host if it is to be there."""
        if not self.optimizer:
            return places
        hosted = {name: _hosted(place, self._device) for name, place in places.items() if place.local.requires_grad}
        # FSDP2 gathers its own copies, so nothing that forward does to them reaches the next step on any plan.
        self._hosted = [place for place in hosted.values() if not place.summed and not place.lent]
        return {**places, **hosted}

    def refreshed(self) -> None:
        """Forward's weights have just been filled."""
        self._met = [_trace(place) for place in self._hosted]

    def check(self) -> None:
        """Raises Refused where forward has changed a weight: on one device the change would stay, here the next
        refresh undoes it. Values are compared where torch has counted a change in place or the memory is another, and
        once in any case, for what is changed through ``.data`` is not counted."""
        if self._met is None:
            return
        for index, place in enumerate(self._hosted):
            now = _trace(place)
            if (now != self._met[index] or not self._proved) and not _alike(place):
                raise Refused(
                    f"plan: offload: forward changes the parameter {place.spec.name}, which is trained on the host, so "
                    "the change would be lost; compute from the parameter what forward needs, or leave "
                    "offload=optimizer out"
                )
            self._met[index] = now
        self._proved = True

    # ---- activations

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds forward and loss.

        Raises:
            Refused: the model uses something of torch that can't be followed.
        """
        if not self.activations:
            yield
            return
        mover = Mover(self._device, (*self._module.parameters(), *self._module.buffers()))
        try:
            with saved_tensors_hooks(mover.pack, mover.unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise Refused(
                "plan: offload: the model takes derivatives with torch.func in forward, which hides what it keeps for "
                "backward; leave offload=activations out"
            ) from error

    def remove(self) -> None:
        """Lets go of everything."""
        self._hosted, self._met = [], None
        del self._module


def _hosted(place: Place, device: torch.device) -> Place:
    memory = torch.empty_like(place.local, device=HOST, pin_memory=device.type == "cuda")
    return replace(place, local=nn.Parameter(memory))


def to_host(gradient: Tensor, local: Tensor) -> Tensor:
    """A gradient where the parameter is that it updates."""
    if gradient.device == local.device:
        return gradient
    if gradient.layout != torch.strided or gradient.device.type != "cuda":
        return gradient.to(local.device)
    return torch.empty_like(gradient, device=local.device, pin_memory=True).copy_(gradient)


def _trace(place: Place) -> tuple[int, int]:
    """Where forward's copy of a parameter lies, and how often it was changed in place."""
    return place.compute.data_ptr(), place.compute._version


def _alike(place: Place) -> bool:
    ours = place.copied
    if ours is None:
        return True
    theirs = place.local.detach().to(ours.device, ours.dtype)
    return bool(((ours == theirs) | (ours != ours)).all())


# --------------------------------------------------------------------------------------------------- activations


class Mover:
    """Takes what autograd keeps to the host, in one forward.

    Args:
        device: what lies elsewhere is left there.
        kept: tensors whose memory stays anyway: the weights and buffers.
    """

    def __init__(self, device: torch.device, kept: Iterable[Tensor]) -> None:
        self._device = device
        plain = (tensor for tensor in kept if type(tensor) in (Tensor, nn.Parameter))  # FSDP2's own are told by type
        self._kept = {_memory(tensor) for tensor in plain if tensor.layout == torch.strided}
        self._moved: dict[int, weakref.ref[_Storage]] = {}

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What stands for the tensor until backward; kept tensors are detached, or each would keep its own graph."""
        if tensor.is_inference():  # has no version, and can't be changed
            return lambda: tensor
        version = tensor._version
        if not self._moves(tensor):
            here = tensor.detach()
            return lambda: _unchanged(here, here, version)
        # Without memory, but with the counter of the tensor's changes.
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        saved = self._view(tensor)
        return lambda: _unchanged(saved.back(), counter, version)

    def unpack(self, packed: Callable[[], Tensor]) -> Tensor:
        """The tensor, on its device again."""
        return packed()

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or isinstance(tensor._base, nn.Parameter):
            return False
        return tensor.untyped_storage().nbytes() >= LEAST_BYTES and _memory(tensor) not in self._kept

    def _view(self, tensor: Tensor) -> _View:
        """How the tensor lies in what is moved: all the memory of what it is a view of; but where that is itself a part
        of some larger memory (as the gates of an LSTM), the tensor alone."""
        whole = tensor if tensor._base is None else tensor._base
        if whole.numel() * whole.itemsize >= tensor.untyped_storage().nbytes():
            there = self._storage(whole, whole)
            return _View(there, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        alone = tensor.detach().clone()
        return _View(self._storage(tensor, alone), tensor.dtype, 0, alone.shape, alone.stride())

    def _storage(self, tensor: Tensor, held: Tensor) -> _Storage:
        """The host's copy of the memory of ``held``, made now unless ``tensor`` has one, unchanged since. Its views
        have its count of changes; others in the same memory may have changed there uncounted."""
        known = self._moved[id(tensor)]() if id(tensor) in self._moved else None
        if known is None or not known.holds(tensor):
            known = _Storage(tensor, held.untyped_storage())
            self._moved[id(tensor)] = weakref.ref(known)
        return known


class _Storage:
    """A tensor's bytes on the host, for as long as something that backward needs lies there."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._of, self._memory, self._version = weakref.ref(tensor), _memory(tensor), tensor._version
        self._device = tensor.device
        self._back: StorageWeakRef | None = None
        pinned = self._device.type == "cuda"
        self._bytes = torch.empty(storage.nbytes(), dtype=torch.uint8, device=HOST, pin_memory=pinned)
        # In the device's order of work: nothing there can overtake it.
        self._bytes.copy_(_bytes(storage, self._device), non_blocking=pinned)

    def holds(self, tensor: Tensor) -> bool:
        """Whether these are the tensor's bytes; another one may have got the first one's id, once that was gone."""
        return self._of() is tensor and (self._memory, self._version) == (_memory(tensor), tensor._version)

    def back(self) -> torch.UntypedStorage:
        """A storage on the device with these bytes; the last one, where that is still in use."""
        if self._back is not None:
            last: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._back.cdata)
            if last is not None:
                return last
        there = torch.empty(self._bytes.numel(), dtype=torch.uint8, device=self._device)
        there.copy_(self._bytes, non_blocking=True)
        self._back = StorageWeakRef(there.untyped_storage())  # type: ignore[no-untyped-call]
        return there.untyped_storage()


@dataclass(frozen=True)
class _View:
    """How a tensor lies in a storage."""

    storage: _Storage
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: tuple[int, ...]

    def back(self) -> Tensor:
        """The tensor on its device."""
        storage = self.storage.back()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.strides
        )


def _unchanged(tensor: Tensor, counter: Tensor, version: int) -> Tensor:
    """The tensor. Torch doesn't look for changes where hooks are; its words, since it is its error."""
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype}, shape {list(tensor.shape)}] is at version {counter._version}; expected version "
            f"{version} instead (with offload=activations)"
        )
    return tensor


def _memory(tensor: Tensor) -> int:
    """The identity of the storage that a tensor lies in, while it lives."""
    found: Any = tensor.untyped_storage()._cdata
    return int(found)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
