"""The fork server: imports the costly modules once, then forks a host for each job.

Run as ``python -m stretto.launch.server SOCKET LIFELINE VARIABLES [MODULE ...]``, with the numbers of two inherited
descriptors, and the names of what in the environment is for this process alone.
It runs no torch operator and starts no thread, because neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
from typing import Any

from stretto.comm.framed import Channel, channel_of
from stretto.errors import one_line
from stretto.launch.allocator import forget_variables
from stretto.launch.host import run_host
from stretto.launch.job import Job
from stretto.launch.limits import raise_open_files
from stretto.launch.process import Child, end_group_with, fork, share_heap


def main(arguments: list[str]) -> int:
    """Serves until the launcher has gone. Returns the exit code."""
    socket_fd, lifeline, variables, modules = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    forget_variables(variables.split(","))
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(lifeline, False)
    end_group_with(lifeline)
    raise_open_files()
    channel = channel_of(socket_fd)
    gc.disable()  # imports make no garbage, and looking for it was a tenth of their time
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = f"{name} cannot be imported: {type(error).__name__}: {one_line(error)}"
            channel.send({"kind": "refused", "text": text})
            return 1
    gc.enable()
    share_heap()
    _Server(channel, lifeline).serve()
    return 0


class _Server:
    """At most one job runs at a time."""

    def __init__(self, channel: Channel, lifeline: int) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._host: Child | None = None

    def serve(self) -> None:
        """Forks, ends and reaps hosts as the launcher says, until it has gone."""
        while not self._channel.at_end:
            poll = select.poll()
            for source in (self._channel, self._host):
                if source is not None:
                    poll.register(source, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._channel.fileno() in ready:
                for message in self._channel.receive_ready():
                    if message["kind"] == "job":
                        self._start(message)
                    elif self._host is not None:
                        self._host.kill_group()
            if self._host is not None and self._host.fileno() in ready:
                status, self._host = self._host.reap(), None
                self._channel.send({"kind": "host-ended", "status": status})

    def _start(self, message: dict[str, Any]) -> None:
        fd = self._channel.take_fd()

        def body() -> int:
            self._channel.close()
            end_group_with(self._lifeline)
            return run_host(Job.from_message(message["job"]), message["directory"], channel_of(fd))

        try:
            self._host = fork(body, own_group=True)
        except OSError as error:
            self._channel.send({"kind": "refused", "text": f"the machine has no room for a process: {error.strerror}"})
        finally:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
