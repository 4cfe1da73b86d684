"""From a global batch of sample ids to the tensors of one microbatch on one rank."""

from stretto.data.cut import Piece, cut
from stretto.data.fetch import fetch, to_device
from stretto.data.sampler import BatchHandle, Position, Sampler
from stretto.data.seeds import Generators, derive_seed, drawn_since, seed_everything

__all__ = [
    "BatchHandle",
    "Generators",
    "Piece",
    "Position",
    "Sampler",
    "cut",
    "derive_seed",
    "drawn_since",
    "fetch",
    "seed_everything",
    "to_device",
]
