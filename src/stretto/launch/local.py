"""Starts workers on this machine, from a fork server that has paid for the imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from stretto.comm.framed import channel_pair
from stretto.elastic.coordinator import Coordinator, Graces
from stretto.elastic.policy import Policy, StopOnFailure
from stretto.launch.allocator import allocator_variables
from stretto.launch.context import check_interface
from stretto.launch.interrupts import Interrupts
from stretto.launch.job import Job, JobResult
from stretto.launch.limits import check_open_files
from stretto.launch.running import RunningJob

_CLOSE_SECONDS = 5.0
_OWN_END_SECONDS = 0.5


class Server:
    """A fork server's process, seen from the launcher."""

    def __init__(self, preload: Sequence[str], allocator: Mapping[str, str]) -> None:
        self.channel, theirs = channel_pair()
        lifeline, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "stretto.launch.server",
                str(theirs.fileno()),
                str(lifeline),
                ",".join(allocator),
                *preload,
            ],
            pass_fds=(theirs.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the launcher's to handle
            # Gloo asks the name service for an interface otherwise, and may choose one that leads nowhere. Who names
            # one is heeded.
            # Asking the driver itself whether there is a GPU would spoil CUDA for every fork.
            env={
                "GLOO_SOCKET_IFNAME": "lo",
                **os.environ,
                **allocator,
                "OMP_NUM_THREADS": "1",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
        )
        theirs.close()
        os.close(lifeline)

    def close(self) -> int:
        """Ends the server and, within the same moment, all that came from it. Returns its exit status."""
        if self._lifeline >= 0:
            if self.channel.at_end:  # it is ending by itself, and its own status says more than our signal
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_OWN_END_SECONDS)
            os.close(self._lifeline)
            self._lifeline = -1
            self.channel.close()
            self._process.wait(_CLOSE_SECONDS)
        return self._process.returncode


class LocalLauncher:
    """Runs jobs one after another, each on workers of this machine. Use it as a context manager, or close it.

    The fork server starts (and imports ``preload``) when the launcher is entered, beside whatever the caller does
    next. Nothing here imports torch. While a job runs, the main thread's SIGINT and SIGTERM are the launcher's: the
    first Ctrl-C or a SIGTERM asks the workers to end at their next safe point, the second Ctrl-C kills them.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        policy: Policy | None = None,
        graces: Graces | None = None,
        own_allocator: bool = True,
    ) -> None:
        """
        Args:
            preload: names of modules.
            policy: answers a worker's bad end (default: stop the job).
            own_allocator: workers run on tcmalloc, where this machine has it and ``LD_PRELOAD`` isn't set; False: on
                what the environment gives any process.
        """
        self._preload = tuple(preload)
        self._allocator = allocator_variables() if own_allocator else {}
        self._policy = policy or StopOnFailure()
        self._graces = graces or Graces()
        self._server: Server | None = None

    def __enter__(self) -> Self:
        self._running_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the fork server and all that came from it."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def run(
        self,
        job: Job,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> JobResult:
        """Runs a job to its end; afterwards nothing of it is left.

        Args:
            on_event: called with the member (or ``host``) and each event it sends.
            on_output: called with what the lowest rank prints, where the job has a ``log_dir``; default: print it.

        Raises:
            LaunchError: the fork server could not do its work, each worker could open too few files, or there is no
                interface of the name that ``GLOO_SOCKET_IFNAME`` gives.
        """
        check_open_files(job.num_workers)
        check_interface()
        with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            coordinator = Coordinator(
                job.num_workers,
                self._policy,
                f"file://{folder}",
                first_member=job.first_member,
                attempt=job.attempt,
                graces=self._graces,
            )
            running = RunningJob(job, coordinator, self._running_server(), interrupts, on_event, on_output)
            whole = False
            try:
                result = running.run()
                whole = running.clear_away()
                return result
            finally:
                if not whole:
                    self.close()

    def _running_server(self) -> Server:
        if self._server is None:
            self._server = Server(self._preload, self._allocator)
        return self._server
