"""The coordinator's protocol: example by example, then thousands of random orders of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.elastic.coordinator import (
    Announce,
    AskToStop,
    AtSafePoint,
    Break,
    Command,
    Coordinator,
    Ended,
    Event,
    Finish,
    GraceOver,
    Graces,
    Hung,
    Joined,
    Kill,
    KillRequested,
    Spawn,
    StopRequested,
    Terminate,
    Wait,
)
from stretto.elastic.epoch import MembershipEpoch
from stretto.elastic.failure import Failure, first_cause
from stretto.elastic.policy import Decision, StopOnFailure


class Scripted:
    """Answers as written, then always ``stop``; remembers what it was asked."""

    def __init__(self, answers: Sequence[Decision]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    def on_end(self, member: str, status: int) -> Decision:
        self.asked.append((member, status))
        return self.answers.pop(0) if self.answers else "stop"


def bad(member: str, time: float = 1.0, code: int = 1, consequence: bool = False) -> Failure:
    return Failure(member, 0, "program", f"{member} at {time}", code, time=time, consequence=consequence)


def started(num_workers: int, policy: Scripted | None = None) -> Coordinator:
    """A coordinator whose first epoch runs."""
    coordinator = Coordinator(num_workers, policy or StopOnFailure(), "file:///s")
    for command in coordinator.start():
        assert isinstance(command, Spawn)
        coordinator.handle(Joined(command.member))
    return coordinator


def test_the_epoch_is_announced_when_the_last_has_joined_in_spawn_order() -> None:
    coordinator = Coordinator(3, StopOnFailure(), "file:///s", first_member=4, attempt=2)
    assert coordinator.start() == [Spawn("m4", 0), Spawn("m5", 1), Spawn("m6", 2)]
    assert coordinator.handle(Joined("m6")) == []
    assert coordinator.handle(Joined("m6")) == []  # once more is not one more
    assert coordinator.handle(Joined("m9")) == []  # nor is a stranger
    assert coordinator.handle(Joined("m4")) == []
    epoch = MembershipEpoch(1, ("m4", "m5", "m6"), "file:///s/epoch-1", 2)
    assert coordinator.handle(Joined("m5")) == [Announce(epoch)]
    assert epoch.rank_of("m5") == 1
    assert MembershipEpoch.from_message(epoch.to_message()) == epoch


def test_all_ending_well_is_exit_code_0() -> None:
    coordinator = started(2)
    assert coordinator.handle(Ended("m2", 0)) == []
    assert coordinator.handle(Ended("m1", 0)) == [Finish(0, None)]
    assert coordinator.handle(Ended("m1", 0)) == [] and coordinator.finished


def test_the_ladder_ends_the_others_rung_by_rung() -> None:
    coordinator = started(3)
    assert coordinator.handle(Ended("m2", 1, bad("m2"))) == [Break(("m1", "m3")), Wait(5.0)]
    assert coordinator.handle(GraceOver()) == [Terminate(("m1", "m3")), Wait(2.0)]
    assert coordinator.handle(Ended("m1", -15, bad("m1", 0.5))) == []
    assert coordinator.handle(GraceOver()) == [Kill(("m3",)), Wait(2.0)]
    # m1 and m3 were ended by us, so m2 is the cause though m1's time is earlier.
    assert coordinator.handle(Ended("m3", -9, bad("m3", 0.1))) == [Finish(1, bad("m2"))]


def test_the_ladder_has_an_end_even_if_a_process_has_none() -> None:
    coordinator = started(2)
    coordinator.handle(Ended("m1", 1, bad("m1", code=7)))
    for _ in range(2):
        coordinator.handle(GraceOver())
    assert coordinator.handle(GraceOver()) == [Finish(7, bad("m1", code=7))]


def test_the_first_failure_is_the_cause_and_consequences_are_set_aside_la08() -> None:
    coordinator = started(3)
    coordinator.handle(Ended("m1", 1, bad("m1", 1.0, consequence=True)))
    coordinator.handle(Ended("m3", 3, bad("m3", 3.0, code=3)))
    assert coordinator.handle(Ended("m2", 2, bad("m2", 2.0, code=2))) == [Finish(2, bad("m2", 2.0, code=2))]


def test_when_all_are_consequences_the_earliest_is_told() -> None:
    failures = [bad("m1", 2.0, consequence=True), bad("m2", 1.0, consequence=True)]
    assert first_cause(failures) == failures[1]
    assert first_cause([]) is None


def test_an_end_before_the_epoch_is_a_failure_even_a_polite_one() -> None:
    coordinator = Coordinator(2, Scripted(["continue"]), "file:///s")
    coordinator.start()
    coordinator.handle(Joined("m1"))
    assert coordinator.handle(Ended("m2", 0)) == [Break(("m1",)), Wait(5.0)]
    [finish] = coordinator.handle(Ended("m1", 0))
    assert isinstance(finish, Finish) and finish.exit_code == 1
    assert finish.failure is not None and "before all 2 workers" in finish.failure.text


def hung(member: str, time: float = 1.0) -> Failure:
    return Failure(member, 0, "hang", f"{member} holds the others up", 1, time=time)


def test_a_hang_ends_all_and_is_the_cause_of_what_the_others_say_then() -> None:
    coordinator = started(2)
    assert coordinator.handle(Hung(hung("m2"))) == [Break(("m1", "m2")), Wait(5.0)]
    assert coordinator.handle(Hung(hung("m1"))) == [], "it is being ended"
    coordinator.handle(Ended("m1", 1, bad("m1", 2.0, consequence=True)))
    assert coordinator.handle(Ended("m2", 3, bad("m2", 3.0, code=3))) == [Finish(1, hung("m2"))]


def test_a_hang_is_the_policys_to_answer_but_not_to_be_left_alone() -> None:
    policy = Scripted(["respawn", "continue"])
    coordinator = started(2, policy)
    coordinator.handle(Hung(hung("m2")))
    coordinator.handle(Ended("m1", 1, bad("m1")))
    assert coordinator.handle(Ended("m2", 1, bad("m2"))) == [Spawn("m3", 0), Spawn("m4", 1)]
    assert coordinator.handle(Hung(hung("m3"))) == [], "there is no epoch yet"
    coordinator.handle(Joined("m3"))
    coordinator.handle(Joined("m4"))
    assert coordinator.handle(Hung(hung("m4"))) == [Break(("m3", "m4")), Wait(5.0)]
    assert policy.asked == [("m2", 1), ("m4", 1)]


def test_continue_leaves_the_others_alone_and_keeps_the_exit_code() -> None:
    coordinator = started(2, Scripted(["continue"]))
    assert coordinator.handle(Ended("m1", 4, bad("m1", code=4))) == []
    assert coordinator.handle(Ended("m2", 0)) == [Finish(4, bad("m1", code=4))]


def test_respawn_ends_the_others_and_starts_as_many_new_members() -> None:
    policy = Scripted(["respawn"])
    coordinator = started(2, policy)
    assert coordinator.handle(Ended("m1", -9, bad("m1"))) == [Break(("m2",)), Wait(5.0)]
    assert coordinator.handle(Ended("m2", 1, bad("m2"))) == [Spawn("m3", 0), Spawn("m4", 1)]
    assert policy.asked == [("m1", -9)]  # the other's end was our doing
    coordinator.handle(Joined("m3"))
    epoch = MembershipEpoch(2, ("m3", "m4"), "file:///s/epoch-2", 2)
    assert coordinator.handle(Joined("m4")) == [Announce(epoch)]
    assert coordinator.handle(Ended("m1", 0)) == []  # of a former life
    coordinator.handle(Ended("m3", 0))
    assert coordinator.handle(Ended("m4", 0)) == [Finish(0, None)]


def test_stop_is_asked_once_and_gives_the_signals_exit_code() -> None:
    coordinator = started(2)
    assert coordinator.handle(StopRequested(15)) == [AskToStop(("m1", "m2")), Wait(60.0)]
    assert coordinator.handle(StopRequested(2)) == []
    coordinator.handle(Ended("m1", 0))
    assert coordinator.handle(Ended("m2", 0)) == [Finish(143, None)]


def test_who_does_not_heed_sigterm_in_time_is_ended_and_told_of_la04() -> None:
    coordinator = started(2)
    coordinator.handle(StopRequested(15))
    assert coordinator.handle(GraceOver()) == [Break(("m1", "m2")), Wait(5.0)]
    assert coordinator.handle(GraceOver()) == [Terminate(("m1", "m2")), Wait(2.0)]
    coordinator.handle(Ended("m1", -15, bad("m1")))
    [finish] = coordinator.handle(Ended("m2", -15, bad("m2")))
    assert isinstance(finish, Finish) and finish.exit_code == 143 and finish.failure is not None
    assert "no safe point within 60 s of SIGTERM" in str(finish.failure)


def test_who_saves_after_sigterm_may_take_its_time() -> None:
    coordinator = started(2)
    coordinator.handle(StopRequested(15))
    assert coordinator.handle(AtSafePoint()) == []
    assert coordinator.handle(GraceOver()) == []


def test_after_an_interrupt_the_person_decides() -> None:
    assert started(2).handle(StopRequested(2)) == [AskToStop(("m1", "m2"))]


def test_a_failure_while_stopping_is_still_a_failure_and_nothing_is_respawned() -> None:
    coordinator = started(1, Scripted(["respawn"]))
    coordinator.handle(StopRequested(2))
    assert coordinator.handle(Ended("m1", 5, bad("m1", code=5))) == [Finish(5, bad("m1", code=5))]


def test_stop_before_the_epoch_ends_at_once() -> None:
    coordinator = Coordinator(2, StopOnFailure(), "file:///s")
    assert coordinator.handle(StopRequested(2)) == [Finish(130, None)]  # still preparing
    coordinator = Coordinator(2, StopOnFailure(), "file:///s")
    coordinator.start()
    coordinator.handle(Joined("m1"))
    assert coordinator.handle(StopRequested(2)) == [Finish(130, None)]


def test_kill_ends_at_once_whatever_goes_on() -> None:
    coordinator = started(2)
    coordinator.handle(StopRequested(2))
    coordinator.handle(Ended("m1", 1, bad("m1")))
    assert coordinator.handle(KillRequested(2)) == [Finish(130, None)]


def test_no_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Coordinator(0, StopOnFailure(), "file:///s")


def test_graces_are_the_callers() -> None:
    coordinator = Coordinator(2, StopOnFailure(), "s", graces=Graces(1.0, 2.0, 3.0))
    coordinator.start()
    assert Wait(1.0) in coordinator.handle(Ended("m1", 1, bad("m1")))
    assert Wait(2.0) in coordinator.handle(GraceOver())
    assert Wait(3.0) in coordinator.handle(GraceOver())


class World:
    """Obeys the commands as an unreliable machine would, and holds every promise to account."""

    def __init__(
        self, draw: Callable[[st.SearchStrategy[Any]], Any], num_workers: int, answers: Sequence[Decision]
    ) -> None:
        self.draw = draw
        self.num_workers = num_workers
        self.coordinator = Coordinator(num_workers, Scripted(answers), "s")
        self.running: dict[str, bool] = {}  # member -> joined
        self.finishes: list[Finish] = []
        self.epochs: list[MembershipEpoch] = []
        self.spawned: list[str] = []
        self.waiting = False
        self.clock = 0.0

    def obey(self, commands: list[Command]) -> None:
        assert not (self.finishes and commands), "a command after Finish"
        for command in commands:
            match command:
                case Spawn(member, rank):
                    assert member not in self.spawned, "an id used twice"
                    assert rank == len(self.spawned) % self.num_workers
                    self.spawned.append(member)
                    self.running[member] = False
                case Announce(epoch):
                    assert len(epoch.members) == self.num_workers == len(set(epoch.members))
                    assert all(self.running[member] for member in epoch.members), "announced to the dead or unborn"
                    assert not self.epochs or epoch.number == self.epochs[-1].number + 1
                    assert epoch.store not in [earlier.store for earlier in self.epochs]
                    self.epochs.append(epoch)
                case AskToStop(members) | Break(members) | Terminate(members) | Kill(members):
                    assert set(members) <= set(self.running), "one that is not ours was signalled"
                case Wait():
                    self.waiting = True
                case Finish():
                    assert command is commands[-1]
                    self.finishes.append(command)

    def choose(self) -> Event:
        choices: list[Event] = []
        for member, joined in self.running.items():
            self.clock += 1.0
            choices.append(Ended(member, 1, bad(member, self.clock)))
            choices.append(Ended(member, 0))
            choices += [] if joined else [Joined(member)] * 4
        choices += [GraceOver()] if self.waiting else []
        choices += [StopRequested(15), AtSafePoint(), Ended("stranger", 1, bad("stranger")), Joined("stranger")]
        choices += [Hung(hung(member, self.clock)) for member in self.running]
        choices += [KillRequested(2)] if self.draw(st.integers(0, 9)) == 0 else []
        event: Event = self.draw(st.sampled_from(choices))
        return event

    def happen(self, event: Event) -> None:
        match event:
            case Joined(member) if member in self.running:
                self.running[member] = True
            case Ended(member):
                self.running.pop(member, None)
            case GraceOver():
                self.waiting = False
            case _:
                pass
        self.obey(self.coordinator.handle(event))


@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_every_order_of_events_keeps_the_promises(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 4))
    answers = data.draw(st.lists(st.sampled_from(get_args(Decision)), max_size=3))
    world = World(data.draw, num_workers, answers)
    world.obey(world.coordinator.start())
    for _ in range(data.draw(st.integers(0, 25))):
        if world.finishes:
            break
        world.happen(world.choose())
    # Whatever has been, when each process that still runs has joined and then ended, the job ends.
    for _ in range(100):
        if world.finishes:
            break
        member, joined = next(iter(world.running.items()))
        world.happen(Ended(member, 0) if joined else Joined(member))
    assert len(world.finishes) == 1
    finish = world.finishes[0]
    assert (finish.failure is None) or finish.exit_code == finish.failure.exit_code != 0
    if not world.epochs:
        assert finish.exit_code != 0, "a job without an epoch cannot have gone well"
    for late in (Joined("m1"), Ended("m1", 0), StopRequested(2), KillRequested(2), GraceOver()):
        assert world.coordinator.handle(late) == []
