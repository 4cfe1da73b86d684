"""Who holds the others up: the deciding as pure code, the rounds of the watcher on a clock of the test's, the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stretto.cli.options import hang_seconds, without_effect
from stretto.watch import Phase, Position, Record, Standing, Subject, Watcher, judge_hang, judge_sizes, state_of_process
from stretto.watch.stack import Stand, stand

IN_VOTE = Standing(0, "m1", "dp=0", "voting on step 3", "stretto/step.py:9 in _vote", "all_reduce no. 7")
AT_WORK = Standing(1, "m2", "dp=1", "in step 3, microbatch 1", "task.py:4 in loss")
THIRD = replace(IN_VOTE, rank=2, member="m3", coordinates="dp=2")
HEAD = "nothing has moved for 300 s: "
SAME = "; every rank must make the same calls in the same order"
TAIL = "while ranks 0, 2 wait in all_reduce no. 7"


# ------------------------------------------------------------------------------------------------- the sentence


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({}, "stands in step 3, microbatch 1, at task.py:4 in loss", id="runs"),
        pytest.param(
            {"loading": "4, 5"}, "waits in step 3, microbatch 1 for its loaders, which owe it samples 4, 5", id="loads"
        ),
        pytest.param(
            {"state": "stopped", "place": ""},
            "is stopped (by SIGSTOP or a debugger; SIGCONT lets it go on); it was last in step 3, microbatch 1",
            id="stopped",
        ),
        pytest.param(
            {"state": "silent"},
            "does not answer (a call outside of Python that never returns?); it was last in step 3, microbatch 1, "
            "at task.py:4 in loss",
            id="silent",
        ),
        pytest.param(
            {"state": "ended", "place": "", "waits_in": "all_reduce no. 7"},
            "has ended; it was last in step 3, microbatch 1",
            id="ended",
        ),
    ],
)
def test_the_rank_that_does_not_come_is_named_with_its_place(changes: dict[str, Any], told: str) -> None:
    culprit = replace(AT_WORK, **changes)
    found = judge_hang([IN_VOTE, culprit, THIRD], 300)
    assert found is not None and found.culprit == culprit
    assert found.text == f"{HEAD}rank 1 (member m2, dp=1) {told}, {TAIL}"


def test_of_several_that_do_not_come_the_one_that_never_will_is_named_first() -> None:
    stopped = replace(AT_WORK, rank=2, member="m3", coordinates="dp=2", state="stopped", place="")
    found = judge_hang([IN_VOTE, AT_WORK, stopped], 300)
    assert found is not None and found.culprit == stopped
    assert found.text.endswith("microbatch 1 (rank 1 did not come either), while rank 0 waits in all_reduce no. 7")


def test_where_all_wait_the_one_in_another_call_is_named() -> None:
    odd = replace(AT_WORK, waits_in="barrier no. 7")
    found = judge_hang([IN_VOTE, odd, THIRD], 300)
    assert found is not None and found.culprit == odd
    assert found.text == (
        f"{HEAD}rank 1 (member m2, dp=1) waits in barrier no. 7, in step 3, microbatch 1, at task.py:4 in loss, "
        f"{TAIL}, voting on step 3, at stretto/step.py:9 in _vote{SAME}"
    )


def test_the_same_call_at_another_point_of_the_step_is_another_call() -> None:
    odd = replace(IN_VOTE, rank=1, member="m2", doing="reducing the gradients of step 3")
    found = judge_hang([IN_VOTE, odd, THIRD], 300)
    assert found is not None and found.culprit == odd


def test_two_that_wait_in_two_calls_are_both_named_and_neither_is_blamed() -> None:
    found = judge_hang([IN_VOTE, replace(AT_WORK, waits_in="barrier no. 7")], 300)
    assert found is not None and found.culprit is None
    assert found.text == (
        f"{HEAD}rank 0 (member m1, dp=0) waits in all_reduce no. 7, voting on step 3, at stretto/step.py:9 in _vote, "
        f"but rank 1 (member m2, dp=1) waits in barrier no. 7, in step 3, microbatch 1, at task.py:4 in loss{SAME}"
    )


def test_all_in_one_call_point_to_what_is_between_them() -> None:
    found = judge_hang([IN_VOTE, THIRD], 300)
    assert found is not None and found.culprit is None
    assert found.text == (
        f"{HEAD}all 2 ranks wait in all_reduce no. 7, voting on step 3, at stretto/step.py:9 in _vote; "
        "is the network between them whole?"
    )


def test_where_nobody_waits_nobody_is_held_up() -> None:
    stopped = replace(IN_VOTE, state="stopped")
    assert judge_hang([stopped, AT_WORK, replace(stopped, rank=2)], 300) is None


def test_of_calls_of_different_sizes_the_rank_at_another_point_is_named_not_the_one_that_was_ended() -> None:
    tail = f": calls of different sizes met, so Gloo ended rank 0 (SIGABRT){SAME}"
    found = judge_sizes([IN_VOTE, AT_WORK, THIRD], 0)
    assert found.culprit == AT_WORK
    where = "rank 1 (member m2, dp=1) was in step 3, microbatch 1, while ranks 0, 2 were voting on step 3"
    assert found.text == where + tail
    found = judge_sizes([IN_VOTE, AT_WORK], 0)
    assert found.culprit is None
    assert found.text == f"rank 0 was voting on step 3 and rank 1 was in step 3, microbatch 1{tail}"
    found = judge_sizes([IN_VOTE, THIRD], 0)
    assert found.culprit is None and found.text == f"ranks 0, 2 were voting on step 3{tail}"


# --------------------------------------------------------------------------------------------------- the rounds


class Play:
    """A watcher of two members, in rounds; ``m1`` waits in a collective."""

    def __init__(self, hang_after: float = 4.0, members: tuple[str, ...] = ("m1", "m2")) -> None:
        self.watcher = Watcher(hang_after)
        self.now = 100.0
        self.subjects = {member: Subject() for member in members}
        self.deaf: set[str] = set()
        self.asked: list[tuple[str, ...]] = []
        self.number = 0
        self.watcher.begin(members, self.now)

    def rounds(self, until: float, each: Callable[[], None] = lambda: None) -> str:
        """Looks whenever it is due; the sentence, once there is one, or nothing at ``until`` seconds from the start."""
        while self.watcher.due is not None and self.watcher.due <= 100 + until:
            self.now = max(self.now, self.watcher.due)
            found = self.watcher.look(self.now, self.subjects.__getitem__)
            if found is not None:
                return found.text
            self.asked.append(self.watcher.to_ask(self.now))
            each()
            for member in self.asked[-1]:
                if member not in self.deaf:
                    self.answer(member)
        return ""

    def answer(self, member: str) -> None:
        moves, waits = self.subjects[member].record.moves, "barrier no. 1" if member == "m1" else ""
        mark = [self.number, waits, 0]
        told = {"moves": moves, "mark": mark, "waits_in": waits, "place": f"{member}.py:1 in f", "loading": ""}
        self.watcher.heard(member, {"kind": "stands", **told})


def test_a_hang_is_told_within_a_few_rounds_of_its_limit_and_not_before() -> None:
    play = Play()
    assert play.rounds(4.0) == ""
    assert "rank 1 (member m2) stands before its first step, at m2.py:1 in f, while rank 0 waits" in play.rounds(6.0)


def test_what_moves_is_no_hang_be_it_a_record_a_call_or_another_rank() -> None:
    play = Play()
    assert play.rounds(60, lambda: play.subjects["m2"].record.moved()) == ""
    play = Play()

    def call() -> None:
        play.number += 1

    assert play.rounds(60, call) == ""
    assert play.rounds(67) != "", "and once it doesn't, it is one"


def test_a_member_that_owes_an_answer_is_not_asked_again_and_told_as_silent() -> None:
    play = Play()
    play.deaf = {"m2"}
    assert "rank 1 (member m2) does not answer" in play.rounds(20)
    assert play.asked[0] == ("m1", "m2") and set(play.asked[1:]) == {("m1",)}


def test_a_late_answer_is_waited_for() -> None:
    """On a machine with too much to do; until a second has passed nobody is called silent."""
    play = Play(hang_after=0.5)
    play.rounds(0.5)
    play.deaf = {"m2"}
    assert play.rounds(1.3) == "", "asked at 0.5 s at the earliest"
    assert "does not answer" in play.rounds(3)


def test_what_was_said_of_an_earlier_microbatch_is_not_repeated() -> None:
    play = Play()
    play.rounds(1)
    play.deaf = {"m2"}
    record = play.subjects["m2"].record
    record.at(Phase.MICROBATCH, 3, 2)
    record.coordinates = "dp=1"
    told = play.rounds(30)
    assert "rank 1 (member m2, dp=1) does not answer" in told
    assert "it was last in step 3, microbatch 2, while rank 0" in told


def test_a_stopped_process_is_known_without_its_help() -> None:
    play = Play()
    play.subjects["m2"].state, play.deaf = "stopped", {"m2"}
    assert "rank 1 (member m2) is stopped" in play.rounds(20)


def test_the_time_in_which_the_asking_process_was_stopped_itself_does_not_count() -> None:
    play = Play(hang_after=10)
    play.rounds(3)
    play.now += 1000
    assert play.rounds(1005) == ""


@pytest.mark.parametrize(("hang_after", "members"), [(0, ("m1", "m2")), (4, ("m1",))])
def test_no_limit_and_a_lone_worker_are_not_watched(hang_after: float, members: tuple[str, ...]) -> None:
    assert Play(hang_after, members).watcher.due is None


def test_the_option_means_seconds_and_says_where_it_does_nothing() -> None:
    assert (hang_seconds(None), hang_seconds(0.0), hang_seconds(7.5)) == (300.0, 0.0, 7.5)
    assert without_effect(7.5, 1) == "--hang-after has no effect: a lone worker waits for nobody"
    assert without_effect(7.5, 2) == without_effect(None, 1) == ""


def test_a_job_that_is_being_ended_is_not_watched() -> None:
    play = Play()
    play.watcher.end()
    assert play.watcher.due is None


# ------------------------------------------------------------------------------------- what a worker says of itself


def told_of(call: Callable[[threading.Event], None]) -> Stand:
    """Where a thread stands that runs ``call``, which lets us know when it is there."""
    there = threading.Event()
    thread = threading.Thread(target=call, args=(there,), daemon=True)
    thread.start()
    assert there.wait(10)
    found = stand(sys._current_frames()[thread.ident or 0])
    thread.join()
    return found


def run(file: str, text: str) -> Callable[[threading.Event], None]:
    """A function ``f(there, inner)`` as if it stood in ``file``."""
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    found: Callable[[threading.Event], None] = names["f"]
    return found


WAIT = "def f(there):\n    there.set()\n    import time\n    time.sleep(0.3)\n"
CALL = "def f(there):\n    inner(there)\n"


def nested(*files: str) -> Callable[[threading.Event], None]:
    """``files`` call one another, the outermost first."""
    *outer, last = files
    found = run(last, WAIT)
    for file in reversed(outer):
        names: dict[str, Any] = {"inner": found}
        exec(compile(CALL, file, "exec"), names)
        found = names["f"]
    return found


OURS = os.path.dirname(sys.modules["stretto.watch"].__file__ or "").removesuffix("/watch")
TORCH = os.path.join(os.path.dirname(os.path.dirname(pytest.__file__)), "torch")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(("/u/task.py",), Stand("/u/task.py:4 in f"), id="the user's code"),
        pytest.param((f"{OURS}/step.py", "/u/task.py"), Stand("/u/task.py:4 in f"), id="called by ours"),
        pytest.param(
            (f"{OURS}/step.py", f"{OURS}/data/loader.py"),
            Stand("stretto/data/loader.py:4 in f", loads=True),
            id="loaders",
        ),
        pytest.param(
            (f"{OURS}/sync/exact.py", f"{OURS}/comm/members.py", f"{TORCH}/distributed/distributed_c10d.py"),
            Stand("stretto/sync/exact.py:2 in f", "f"),
            id="a collective of ours",
        ),
        pytest.param(
            ("/u/loop.py", f"{OURS}/step.py", f"{OURS}/sync/buckets.py"),
            Stand("/u/loop.py:2 in f (there stretto/sync/buckets.py:4 in f)", "the reduction of gradients"),
            id="under the user's loop",
        ),
        pytest.param(
            ("/u/loop.py", f"{TORCH}/distributed/distributed_c10d.py"),
            Stand("/u/loop.py:2 in f", "f"),
            id="a user's own",
        ),
        pytest.param(
            (f"{TORCH}/distributed/fsdp/x.py", "/u/model.py", f"{TORCH}/nn/linear.py"),
            Stand("/u/model.py:2 in f"),
            id="work within hooks",
        ),
        pytest.param(
            (f"{OURS}/run.py", f"{OURS}/checkpoint/writer.py"),
            Stand("stretto/checkpoint/writer.py:4 in f", "the saving of a checkpoint", saves=True),
            id="saving",
        ),
    ],
)
def test_a_stack_tells_the_place_and_whether_it_waits(files: tuple[str, ...], expected: Stand) -> None:
    assert told_of(nested(*files)) == expected


def test_a_position_is_seen_through_its_record_from_another_process_s_view() -> None:
    position = Position()
    fd = position.share()
    seen = Record.of(fd)
    os.close(fd)
    assert (seen.doing(), seen.coordinates, seen.moves) == ("before its first step", "", 0)
    position.begin("dp_shard=1, tp=0", lambda: ("", 9))
    position.at(Phase.MICROBATCH, 3, 2, (5, 6))
    assert (seen.doing(), seen.coordinates, seen.moves) == ("in step 3, microbatch 2", "dp_shard=1, tp=0", 1)
    position.at(Phase.VOTE, 3)
    assert seen.doing() == "voting on step 3"
    position.moved()
    told = position.told()
    assert (told["moves"], told["mark"], told["waits_in"], told["loading"]) == (3, [9, "", 0], "", "")
    assert "in test_a_position_is_seen" in told["place"]


def test_the_state_of_a_process() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert state_of_process(child.pid) == "answers"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of_process(child.pid) == "stopped"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert state_of_process(child.pid) == "ended", "be it unreaped"
    finally:
        child.kill()
        child.wait()
    assert state_of_process(child.pid) == "ended"
