"""Starts the workers of a benchmark: forks of one process that has imported torch and run no operator."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable

from stretto.comm.group import Group, Rendezvous


def run_forked(workers: int, body: Callable[[Group], None]) -> None:
    """Calls ``body`` with a formed group in each of ``workers`` processes; exits with 1 where one fails."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, workers, folder, body) for rank in range(workers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(1)


def _fork(rank: int, workers: int, folder: str, body: Callable[[Group], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        import torch

        torch.set_num_threads(1)
        body(Group(Rendezvous(f"file://{folder}/store", 1, rank, workers)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
