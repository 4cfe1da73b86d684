"""What runs aside leaves nothing here, and fails here where it fails there."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from stretto.errors import ProbeFailed
from stretto.launch.process import aside


def test_it_runs_in_another_process_and_its_memory_stays_there() -> None:
    held: list[torch.Tensor] = []

    def work() -> list[int]:
        held.append(torch.ones(1000))
        return [os.getpid(), len(held)]

    pid, count = aside(work)
    assert pid != os.getpid() and count == 1 and not held


def test_operators_have_their_threads_there_though_there_were_some_here() -> None:
    """Of OpenMP, whose threads a fork leaves behind: who calls them in the child by the same thread waits for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        large = torch.ones(600, 600)
        here = float((large @ large).sum())  # on several threads
        assert aside(lambda: [torch.get_num_threads(), float((large @ large).sum())]) == [2, here]
    finally:
        torch.set_num_threads(before)


def test_what_raises_there_is_met_here() -> None:
    here = os.getpid()

    def work() -> None:
        raise KeyError(f"in {os.getpid()}")

    with pytest.raises(KeyError, match=f"in {here}"):
        aside(work)


def test_what_is_killed_there_is_told_and_not_tried_here() -> None:
    here = os.getpid()

    def work() -> None:
        assert os.getpid() != here
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProbeFailed, match="ended by SIGKILL"):
        aside(work)
