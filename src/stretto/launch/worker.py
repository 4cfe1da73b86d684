"""One worker's life: join, hear the epoch, do the work, say how it went."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import Any

from stretto.comm.framed import Channel
from stretto.elastic.epoch import MembershipEpoch
from stretto.errors import LaunchError
from stretto.launch.context import WorkerContext, enter
from stretto.launch.control import ChannelControl
from stretto.launch.failures import describe
from stretto.launch.job import Job, resolve
from stretto.launch.process import flush_output, pass_death_to_forks
from stretto.watch import Position


def run_worker(job: Job, member: str, channel: Channel, prepared: Any, imports_rss_bytes: int) -> int:
    """The body of a worker's process, just forked from its host. Returns the exit code."""
    pass_death_to_forks()
    atexit._clear()  # what the host has registered is the host's
    log = job.log_of(member)
    if log is not None:
        try:
            print_to(log)
        except OSError as error:
            channel.send(describe(LaunchError(f"the log {log} cannot be written: {error.strerror}")))
            return LaunchError.exit_code
    faulthandler.enable(file=2)
    set_threads(job.threads)

    position = Position()
    record = position.share()
    channel.send({"kind": "joined", "pid": os.getpid()}, [record])
    os.close(record)
    message = channel.receive()
    if message is None:
        return 1  # the launcher ended before there was an epoch
    control = ChannelControl(channel)
    epoch = MembershipEpoch.from_message(message)
    context = WorkerContext(member, epoch, prepared, control, imports_rss_bytes, local_rank=epoch.rank_of(member))
    context.position, context.hang_after = position, job.hang_after
    control.watch(position.told)
    enter(context)
    return _work(job, context, channel)


def _work(job: Job, context: WorkerContext, channel: Channel) -> int:
    try:
        result = resolve(job.entry)(job.payload, context)
        _leave_like_a_script()
        channel.send({"kind": "done", "result": result})
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _leave_like_a_script()
            channel.send({"kind": "done", "result": None})
            return 0
        word = describe(error, context.coordinates)  # the launcher shows it, and writes it to our log
        flush_output()
        channel.send(word)
        # The others may wait for us in a collective, so we end at once and wait for no thread.
        return int(word["exit_code"])
    return 0


def _leave_like_a_script() -> None:
    """Waits for threads and runs exit handlers, as the interpreter does at a script's end. The process itself ends
    without taking the shared heap apart, which would copy it."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    flush_output()


def print_to(log: Path) -> None:
    """Sends standard output and error of this process, and of all it starts, to the end of the file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(file, number)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a kill loses no line
    os.close(file)


def set_threads(threads: int) -> None:
    """Threads of one operator, here and in programs started from here."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
