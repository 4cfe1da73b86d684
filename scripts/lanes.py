"""Every test, in two lanes at once: `python scripts/lanes.py [PYTEST ARGUMENTS]`.

Many tests wait: for a process to start on one core, for a grace to pass. Two lanes fill both cores meanwhile. Tests
that are marked ``alone``, because they measure time or memory, come after both, with nothing beside them.

The first lane's output is shown as it comes, the other's after it, whole. A Ctrl-C or SIGTERM ends both, and a second
one at once.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

SECOND = ("tests/parity", "tests/chaos")
LANES = (("tests", *(f"--ignore={folder}" for folder in SECOND)), SECOND)  # a new folder's tests are in the first
EVERYDAY = "not matrix and not chaos"
END_SECONDS = 10


def start(words: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """A pytest in a process group of its own: signals reach it through this process, and so once."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        process_group=0,
    )


def wait(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit statuses; where this process is interrupted, they are too, and killed soon after or at a second time.

    A test whose launcher takes the interrupt for itself only ends its job, and pytest goes on.
    """
    try:
        return [lane.wait() for lane in running]
    except KeyboardInterrupt:
        left = [lane for lane in running if lane.poll() is None]
        try:
            for lane in left:
                lane.send_signal(signal.SIGINT)
            for lane in left:
                lane.wait(END_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            for lane in left:
                lane.kill()
        raise


def main(arguments: Sequence[str]) -> int:
    """Returns the first exit status that is not 0."""
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: who starts this in the background has it ignored
        signal.signal(number, signal.default_int_handler)
    together, apart = f"{EVERYDAY} and not alone", f"{EVERYDAY} and alone"
    with tempfile.TemporaryFile() as kept:
        print("tests: lane 1 of 2 (lane 2 runs beside it, and is shown after it)", flush=True)
        lanes = [
            start([*lane, "-m", together, *arguments], output) for lane, output in zip(LANES, (None, kept), strict=True)
        ]
        try:
            statuses = wait(lanes)
        finally:
            print(f"tests: lane 2 of 2, {' and '.join(SECOND)}", flush=True)
            kept.seek(0)
            shutil.copyfileobj(kept, sys.stdout.buffer)
            sys.stdout.flush()
    print("tests: those that run alone", flush=True)
    statuses += wait([start(["tests", "-m", apart, *arguments])])
    return next((abs(status) for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
