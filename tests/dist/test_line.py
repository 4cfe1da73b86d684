"""Messages from one member to another: whole, in order by tag, without a wait for each other's room, told when lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.launch import Job, JobResult, LocalLauncher

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


def start(launcher: LocalLauncher, entry: str, workers: int, **payload: Any) -> JobResult:
    return launcher.run(Job(f"line_entries:{entry}", payload, workers, python_path=(HELPERS,)), lambda text: None)


def run(launcher: LocalLauncher, entry: str, workers: int, **payload: Any) -> list[Any]:
    result = start(launcher, entry, workers, **payload)
    assert result.failure is None, result.failure.text
    return [result.results[member] for member in sorted(result.results)]


@pytest.mark.parametrize("workers", [2, 3])
def test_all_send_to_all_more_than_there_is_room_for(launcher: LocalLauncher, workers: int) -> None:
    """The largest messages are larger than a ring, and everyone sends before anyone receives."""
    for found in run(launcher, "crossing", workers, room=1000):
        assert found == {"right": 6 * (workers - 1), "of": 6 * (workers - 1), "rings": workers - 1}


@pytest.mark.parametrize("entry", ["crossing", "no_room"])
def test_without_shared_memory_the_same_goes_over_gloo(launcher: LocalLauncher, entry: str) -> None:
    for found in run(launcher, entry, 2, room=1000 if entry == "no_room" else 0):
        assert found == {"right": 6, "of": 6, "rings": 0}


@pytest.mark.parametrize("room", [0, 1000])
def test_messages_of_one_tag_keep_their_order(launcher: LocalLauncher, room: int) -> None:
    assert run(launcher, "same_tag", 2, room=room)[1] == {"seen": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}


def test_a_message_of_another_size_is_told(launcher: LocalLauncher) -> None:
    found = run(launcher, "other_size", 2, room=1000)[1]
    assert "a message of 16 bytes came where one of 20 was expected (tag 1)" in found["says"]


@pytest.mark.parametrize("how", ["message", "room"])
def test_a_member_that_dies_is_told_to_who_waits_for_it(launcher: LocalLauncher, how: str) -> None:
    result = start(launcher, "lost", 2, room=1000, how=how)
    assert result.failure is not None and "SIGKILL" in str(result.failure)
