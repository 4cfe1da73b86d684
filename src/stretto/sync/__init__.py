"""The replicate axis: how what each rank learnt becomes what all of them learn."""

from stretto.sync._base import Sync
from stretto.sync.build import build_sync

__all__ = ["Sync", "build_sync"]
