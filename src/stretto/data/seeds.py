"""Every random number of a run derives from the recipe's seed and from *what* is drawn, never from *where*."""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed for ``key`` (``"item", epoch, id`` or ``"forward", step, index``), the same on every rank."""
    text = "/".join(map(str, (seed, *key))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(value: int) -> None:
    """Seeds torch, here and on CUDA devices, Python's ``random`` and NumPy's legacy generator.

    ``torch.manual_seed`` would also leave a seed for each kind of device that is not in use, with a stack that it
    formats for it: a millisecond within a run, and this is called for each microbatch.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
    _seed_host(value)


def drawn_since(value: int, device: torch.device) -> bool:
    """Whether torch has drawn any number, here or on ``device``, since ``seed_everything(value)``."""
    fresh = torch.Generator().manual_seed(value).get_state()
    if device.type == "cuda":
        offset = torch.cuda.get_rng_state(device)[8:]  # after the seed comes the count of what was drawn
        return bool(offset.any()) or not torch.equal(fresh, torch.get_rng_state())
    return not torch.equal(fresh, torch.get_rng_state())


def seed_items(value: int) -> None:
    """Like :func:`seed_everything` for code that runs on the host only, once a sample."""
    torch.default_generator.manual_seed(value)
    _seed_host(value)


def _seed_host(value: int) -> None:
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value % 2**32)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Generators:
    """The states of the global generators at one moment, to be put back later."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def remember(cls) -> Generators:
        """The states as they are now."""
        import numpy

        cuda = tuple(torch.cuda.get_rng_state_all()) if _cuda_in_use() else ()
        return cls(torch.get_rng_state(), cuda, random.getstate(), tuple(numpy.random.get_state()))

    def restore(self) -> None:
        """Puts the states back."""
        import numpy

        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def to_json(self) -> dict[str, Any]:
        """The host's states as plain JSON; a device's generator is reseeded at each microbatch and needs no record."""
        kind, keys, position, has_gauss, gauss = self.numpy
        version, internal, gauss_next = self.python
        return {
            "torch": bytes(self.torch_cpu.numpy().tobytes()).hex(),
            "python": [version, list(internal), gauss_next],
            "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Generators:
        """The inverse of :meth:`to_json`."""
        import numpy

        version, internal, gauss_next = record["python"]
        kind, keys, position, has_gauss, gauss = record["numpy"]
        state = torch.frombuffer(bytearray(bytes.fromhex(record["torch"])), dtype=torch.uint8)
        return cls(
            state,
            (),
            (version, tuple(internal), gauss_next),
            (kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss),
        )
