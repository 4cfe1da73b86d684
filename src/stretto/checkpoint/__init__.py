"""Checkpoints: folders that exist only whole, with one digest for each logical tensor.

``writer`` saves in the background, ``reader`` finds the newest whole one and reads it under any cut.
"""

from stretto.checkpoint.names import list_checkpoints
from stretto.checkpoint.plain import json_only, pack, unpack
from stretto.checkpoint.points import COMMITTER_POINTS, MEMBER_POINTS
from stretto.checkpoint.reader import Checkpoint, newest_whole, open_checkpoint
from stretto.checkpoint.snapshot import Snapshot, snapshot_slices
from stretto.checkpoint.tidy import sweep
from stretto.checkpoint.writer import CheckpointWriter

__all__ = [
    "COMMITTER_POINTS",
    "MEMBER_POINTS",
    "Checkpoint",
    "CheckpointWriter",
    "Snapshot",
    "json_only",
    "list_checkpoints",
    "newest_whole",
    "open_checkpoint",
    "pack",
    "snapshot_slices",
    "sweep",
    "unpack",
]
