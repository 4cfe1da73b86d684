"""How much of a long run's time is worth something, where devices fail.

Failures come independently of one another: with ``devices`` of a mean time between failures of ``mtbf_seconds`` each,
the job meets one every ``mtbf_seconds / devices`` in the mean.

*Checkpoint and restart*: a failure costs what was computed since the last checkpoint, and the restart. The mean time
of an interval with its checkpoint, failures and restarts included, is
``(1 / rate + restart) (exp(rate (interval + save)) - 1)`` (Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22, 2006, section 2).

*Recovery*: those that are left build new groups, redo the step and go on; the failed device's share of the work is
missing until another takes its place. Nothing but the step is computed again, as long as one copy of each part of the
state is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DAY: Final = 86400.0
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Failures:
    """What goes wrong, and how long it takes to mend.

    Args:
        devices: of the job.
        mtbf_seconds: of one device.
        restart_seconds: from a failure until a job that was started anew computes again, reading its checkpoint
            included.
        recovery_seconds: from a failure until the others compute again.
        repair_seconds: until a failed device is replaced.
    """

    devices: int
    mtbf_seconds: float
    restart_seconds: float = 600.0
    recovery_seconds: float = 30.0
    repair_seconds: float = 3600.0

    def __post_init__(self) -> None:
        """Raises ValueError for what means nothing."""
        if self.devices < 1 or self.mtbf_seconds <= 0:
            raise ValueError("a job has at least one device, and a device's mean time between failures is over 0")

    @property
    def rate(self) -> float:
        """Failures of the job in a second."""
        return self.devices / self.mtbf_seconds


@dataclass(frozen=True)
class Goodput:
    """Shares of a run's time that are worth something.

    Args:
        restart: with checkpoints and restarts, at the best interval; ``interval_seconds`` between checkpoints.
        recovery: with recovery, and checkpoints as often.
        failures: that are to be expected in the run.
    """

    restart: float
    recovery: float
    interval_seconds: float
    failures: float


def restart_share(failures: Failures, interval_seconds: float, save_seconds: float) -> float:
    """The share with checkpoints every so often, each of which holds the job up for ``save_seconds``."""
    exponent = failures.rate * (interval_seconds + save_seconds)
    if exponent > 500:
        return 0.0
    return interval_seconds / ((1 / failures.rate + failures.restart_seconds) * math.expm1(exponent))


def best_interval(failures: Failures, save_seconds: float) -> float:
    """Seconds between checkpoints for the largest share, by golden section; it has one peak."""
    save = max(save_seconds, 1e-3)
    low, high = math.log(save / 100), math.log(max(100 * save, 10 / failures.rate))
    while high - low > 1e-6:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if restart_share(failures, math.exp(left), save) < restart_share(failures, math.exp(right), save):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


def goodput(failures: Failures, days: float, step_seconds: float, save_seconds: float) -> Goodput:
    """Of a run of so many days.

    Args:
        save_seconds: for which a checkpoint holds the job up.
    """
    interval = best_interval(failures, save_seconds)
    lost = failures.recovery_seconds + step_seconds / 2
    present = failures.mtbf_seconds / (failures.mtbf_seconds + failures.repair_seconds)
    saving = interval / (interval + save_seconds)
    recovery = present * saving / (1 + failures.rate * lost)
    return Goodput(
        restart_share(failures, interval, max(save_seconds, 1e-3)),
        recovery,
        interval,
        failures.rate * days * DAY,
    )
