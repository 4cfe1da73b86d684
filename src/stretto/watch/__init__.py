"""What every rank is doing, and who holds the others up: a run in which nothing moves ends with one sentence."""

from typing import Final

from stretto.watch.hang import Hang, Standing, State, judge_hang, judge_sizes
from stretto.watch.position import Position
from stretto.watch.record import Phase, Record
from stretto.watch.watcher import Subject, Watcher, state_of_process

HANG_AFTER_SECONDS: Final = 300.0

__all__ = [
    "HANG_AFTER_SECONDS",
    "Hang",
    "Phase",
    "Position",
    "Record",
    "Standing",
    "State",
    "Subject",
    "Watcher",
    "judge_hang",
    "judge_sizes",
    "state_of_process",
]
