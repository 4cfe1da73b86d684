"""From a global batch of sample ids to the tensors of one microbatch on one rank."""

from stretto.data.cut import Piece, cut
from stretto.data.feeder import Feeder, open_feeders
from stretto.data.fetch import fetch
from stretto.data.lengths import check_lengths, lengths_of, resumed_position
from stretto.data.sampler import BatchHandle, Position, Sampler
from stretto.data.seeds import Generators, derive_seed, drawn_since, seed_everything
from stretto.data.tree import mapped, tensors_in, to_device

__all__ = [
    "BatchHandle",
    "Feeder",
    "Generators",
    "Piece",
    "Position",
    "Sampler",
    "check_lengths",
    "cut",
    "derive_seed",
    "drawn_since",
    "fetch",
    "lengths_of",
    "mapped",
    "open_feeders",
    "resumed_position",
    "seed_everything",
    "tensors_in",
    "to_device",
]
