"""Logical tensors: what a state *is*, apart from which member holds which part of it under which plan."""

from stretto.state.logical import Box, Slice, TensorSpec, tiling_fault
from stretto.state.owners import assign_owners
from stretto.state.part import Part
from stretto.state.shares import Bucket, Shares, deal, pack
from stretto.state.source import MemorySource, SliceSource, StateSource

__all__ = [
    "Box",
    "Bucket",
    "MemorySource",
    "Part",
    "Shares",
    "Slice",
    "SliceSource",
    "StateSource",
    "TensorSpec",
    "assign_owners",
    "deal",
    "pack",
    "tiling_fault",
]
