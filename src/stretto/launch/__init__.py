"""Starts workers and ends them: a fork server, one host process a job, death passed down the whole chain.

Nothing here imports torch; the fork server does, when it is asked to.
"""

from stretto.launch.context import WorkerContext, attach, current
from stretto.launch.control import Control
from stretto.launch.job import Job, JobResult
from stretto.launch.local import LocalLauncher

__all__ = ["Control", "Job", "JobResult", "LocalLauncher", "WorkerContext", "attach", "current"]
