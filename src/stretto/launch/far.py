"""A host's end of a conversation with a process on another: it does what it is told, and ends when the other does.

Run as ``python -m stretto.launch.far`` by whatever reaches the host (ssh, ``ip netns exec``). Orders come as lines of
JSON on standard input, answers go as such on standard output: ``{"call": "module:function", "payload": ...}`` calls a
function here; ``{"work": ...}`` starts workers of the variables that torchrun sets, see :class:`Work`. Once standard
input ends, the process ends at once with its whole group, so nothing is left where the near side was killed or the way
to it was cut.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

from stretto.errors import UserError, one_line
from stretto.launch.context import attach
from stretto.launch.interface import named_interface
from stretto.launch.job import resolve
from stretto.launch.process import die_with

_LOOK_SECONDS: Final = 0.05
_MOST_SAID: Final = 2000  # bytes of a worker's last words


@dataclass(frozen=True)
class Work:
    """Workers of several hosts that meet at one address.

    Args:
        entry: ``module:function``, called in each as ``function(payload, context)``.
        world_size: of all hosts; ``first_rank`` and ``workers``: of those here.
        meeting: address and port at which rank 0 hosts the store.
        interface: by which they talk, unless the user has named one.
    """

    entry: str
    payload: Any
    world_size: int
    first_rank: int
    workers: int
    meeting: tuple[str, int]
    interface: str
    threads: int = 1

    def to_message(self) -> dict[str, Any]:
        """As an order."""
        return {"work": asdict(self)}

    def variables(self, local_rank: int) -> dict[str, str]:
        """What :func:`stretto.launch.attach` reads, and what Gloo does."""
        found = {
            "RANK": self.first_rank + local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": local_rank,
            "MASTER_ADDR": self.meeting[0],
            "MASTER_PORT": self.meeting[1],
            "OMP_NUM_THREADS": self.threads,
            "GLOO_SOCKET_IFNAME": named_interface() or self.interface,
            "TORCHELASTIC_USE_AGENT_STORE": "",
        }
        return {name: str(value) for name, value in found.items()}


class _Worker:
    """One process, which says its result on standard output and all else on standard error."""

    def __init__(self, work: Work, local_rank: int) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        words = json.dumps([work.entry, work.payload])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stretto.launch.far", str(os.getpid()), words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, **work.variables(local_rank)},
        )

    def ended(self) -> int | None:
        return self._process.poll()

    def result(self) -> Any:
        return json.loads(_whole(self._out))

    def said(self) -> str:
        """Its last line."""
        lines = _whole(self._err)[-_MOST_SAID:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"a worker ended with status {self.ended()}"

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._out.close()
        self._err.close()


def _whole(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _run(order: Mapping[str, Any]) -> dict[str, Any]:
    work = Work(**order)
    workers = [_Worker(work, rank) for rank in range(work.workers)]
    try:
        while any(worker.ended() is None for worker in workers):
            if bad := next((worker for worker in workers if worker.ended()), None):
                return {"error": bad.said()}
            time.sleep(_LOOK_SECONDS)
        if bad := next((worker for worker in workers if worker.ended()), None):
            return {"error": bad.said()}
        return {"result": [worker.result() for worker in workers]}
    finally:
        for worker in workers:
            worker.end()


def _answer(order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "work" in order:
            return _run(order["work"])
        return {"result": resolve(order["call"])(order["payload"])}
    except UserError as error:
        return {"error": one_line(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {one_line(error)}"}


def _serve() -> None:
    """Until standard input ends."""
    with suppress(PermissionError):  # a group's leader already
        os.setsid()
    answers = _own_output()
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    answer: dict[str, Any] = {"result": "here"}
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        answer = _answer(json.loads(orders.get()))


def _work(parent: int, entry: str, payload: Any) -> int:
    """One worker. Returns its status."""
    die_with(parent)
    results = _own_output()
    try:
        found = resolve(entry)(payload, attach())
    except UserError as error:
        print(one_line(error), file=sys.stderr)
        return error.exit_code
    results.write(json.dumps(found).encode())
    results.flush()
    return 0


def _own_output() -> IO[bytes]:
    """Standard output for this module alone: what others print there goes where errors go."""
    mine = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return mine


if __name__ == "__main__":
    if len(sys.argv) > 1:
        status = _work(int(sys.argv[1]), *json.loads(sys.argv[2]))
        sys.stderr.flush()
        os._exit(status)  # waits for no thread of a group that is broken
    _serve()
