"""Parameters of which each rank updates a share, in flat memory, so that one call brings many of them.

Where the ranks share memory they may have them once between them. Then there is nothing to bring: a rank writes its
share where the others read it, and all wait for one another before they do. Nobody reads while another writes: a rank
updates only once every rank's gradients have come, and reads only once every rank has updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from stretto.comm.members import Members
from stretto.errors import Refused
from stretto.parallel.copies import lay_flat
from stretto.state import Bucket, Shares, TensorSpec, pack

GATHER_BYTES: Final = 32 * 2**20
_ALIGNED: Final = 64  # bytes


def without_one_copy(why: str, what: str) -> str:
    """What there is to say where workers that could share memory have none for the weights."""
    said = f"zero=3 without one copy of the weights for all workers, as {why}"
    return f"{said}; each gathers {what} instead, which is slower"


class Flats:
    """The dealt parameters of one module.

    Args:
        parameters: forward's own, by name; those that are dealt are moved.
        specs: of the dealt ones, as they lie here.
        shares: what each member of ``world`` updates of each.
        one_copy: the members have them once between them.

    Raises:
        Unavailable: on every rank alike, where ``one_copy`` is asked of ranks that can't share memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Sequence[TensorSpec],
        shares: Mapping[str, Shares],
        world: Members,
        one_copy: bool,
    ) -> None:
        self._world, self._one_copy = world, one_copy
        buckets = pack(specs, shares, GATHER_BYTES)
        types = [parameters[bucket.names[0]].dtype for bucket in buckets]
        flats = self._memory([(bucket.numel, dtype) for bucket, dtype in zip(buckets, types, strict=True)])
        for bucket, flat in zip(buckets, flats, strict=True):
            lay_flat({name: parameters[name] for name in bucket.names}, bucket.offsets, flat)
        self._flats: list[tuple[Bucket, torch.Tensor]] = list(zip(buckets, flats, strict=True))
        self._parameters = {name: parameters[name] for name in shares}
        self._at = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}

    def _memory(self, wanted: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """New flat tensors of so many elements of a type."""
        if not self._one_copy:
            return [torch.empty(numel, dtype=dtype, device=self._world.device) for numel, dtype in wanted]
        rooms = [-(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED for numel, dtype in wanted]
        cells = torch.split(self._world.shared_memory(sum(rooms)), rooms)
        return [room[: numel * dtype.itemsize].view(dtype) for room, (numel, dtype) in zip(cells, wanted, strict=True)]

    def bring(self) -> None:
        """The other shares, from their owners; of one copy, that their owners have written them."""
        if self._one_copy:
            self._world.barrier()
            return
        for bucket, flat in self._flats:
            assert bucket.sizes is not None
            self._world.gather_parts(flat, bucket.sizes)

    def check(self) -> None:
        """Raises Refused where forward has put a parameter elsewhere."""
        for name, address in self._at.items():
            if self._parameters[name].data_ptr() != address:
                raise Refused(
                    f"plan: forward gives the parameter {name} other memory (it says {name}.data = ...), where updates "
                    "don't reach it; compute from the parameter what forward needs, or use zero=0"
                )
