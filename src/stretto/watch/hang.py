"""Who holds the others up: positions in, one sentence out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

State = Literal["answers", "silent", "stopped", "ended"]
_WORST_FIRST: Final = ("ended", "stopped", "silent", "answers")
_SAME: Final = "every rank must make the same calls in the same order"


@dataclass(frozen=True)
class Message:
    """How a rank stands to messages from one rank to another.

    Args:
        sender: the rank whose message it waits for; None where it doesn't.
        after: how many pieces of work the sender has behind it once that is sent.
        passed: how many this rank has behind it.
    """

    sender: int | None = None
    after: int = 0
    passed: int = 0


@dataclass(frozen=True)
class Standing:
    """What is known of one rank while nothing moves.

    Args:
        doing: ``in step 3, microbatch 1``.
        place: ``file:line in function``; of a rank that does not answer, what it said of this microbatch, if anything.
        waits_in: the collective that it waits in; empty where it is elsewhere.
        loading: the samples that its loaders owe it, where it waits for these.
        message: how it stands to messages between two ranks.
        state: whether it answers; a ``stopped`` process does nothing until it gets SIGCONT.
    """

    rank: int
    member: str
    coordinates: str = ""
    doing: str = ""
    place: str = ""
    waits_in: str = ""
    loading: str = ""
    state: State = "answers"
    message: Message = Message()

    @property
    def waits(self) -> bool:
        """It answers, and waits for others in a collective."""
        return self.state == "answers" and bool(self.waits_in)

    def who(self) -> str:
        """``rank 1 (member m2, dp=1)``."""
        return f"rank {self.rank} (member {self.member}{', ' if self.coordinates else ''}{self.coordinates})"


@dataclass(frozen=True)
class Hang:
    """Why nothing moves; ``culprit`` is None where the positions blame nobody."""

    culprit: Standing | None
    text: str


def judge_hang(standings: Sequence[Standing], seconds: float) -> Hang | None:
    """What keeps a run from moving; None where no rank waits in a collective, as then nobody is held up.

    Args:
        standings: of all ranks, in rank order; none has moved for ``seconds``.
    """
    waiting = [each for each in standings if each.waits]
    if not waiting:
        return None
    head = f"nothing has moved for {seconds:g} s: "
    away = sorted((each for each in standings if not each.waits), key=lambda each: _WORST_FIRST.index(each.state))
    if away:
        culprit, others = away[0], sorted(each.rank for each in away[1:])
        also = f" ({_ranks(others)} did not come either)" if others else ""
        return Hang(culprit, f"{head}{_away(culprit)}{also}, while {_waiting(_groups(waiting)[0])}")
    for each in waiting:
        sender = standings[each.message.sender] if each.message.sender is not None else each
        if sender is not each and sender.message.passed >= each.message.after:
            told = f"{sender.who()} has not sent what rank {each.rank} waits for, {each.waits_in}, and has gone on"
            return Hang(sender, f"{head}{told}: it waits in {sender.waits_in}, {_where(sender)}")
    groups = _groups(waiting)
    if len(groups) == 1:
        all_of_them = f"all {len(waiting)} ranks wait in {waiting[0].waits_in}, {_where(waiting[0])}"
        return Hang(None, f"{head}{all_of_them}; is the network between them whole?")
    odd = groups[-1]
    if len(groups) == 2 and len(odd) == len(groups[0]):
        one, other = (f"{group[0].who()} waits in {group[0].waits_in}, {_where(group[0])}" for group in groups)
        return Hang(None, f"{head}{one}, but {other}; {_SAME}")
    told = f"{odd[0].who()} waits in {odd[0].waits_in}, {_where(odd[0])}"
    return Hang(odd[0], f"{head}{told}, while {_waiting(groups[0])}, {_where(groups[0][0])}; {_SAME}")


def judge_sizes(standings: Sequence[Standing], ended: int) -> Hang:
    """Which rank made another call than most, where two calls of different sizes met.

    Gloo then aborts the process of the rank that got more bytes than it had asked for, whoever is to blame.

    Args:
        standings: of all ranks, as they were then.
        ended: the rank whose process was aborted.
    """
    found: dict[str, list[Standing]] = {}
    for each in standings:
        found.setdefault(each.doing, []).append(each)
    *odd, most = sorted(found.values(), key=len)
    tail = f"calls of different sizes met, so Gloo ended rank {ended} (SIGABRT); {_SAME}"
    if odd and 2 * len(most) > len(standings):
        return Hang(odd[0][0], f"{odd[0][0].who()} was {odd[0][0].doing}, while {_were(most)}: {tail}")
    return Hang(None, f"{' and '.join(_were(group) for group in found.values())}: {tail}")


def _were(group: Sequence[Standing]) -> str:
    return f"{_ranks([each.rank for each in group])} {'were' if len(group) > 1 else 'was'} {group[0].doing}"


def _groups(waiting: Sequence[Standing]) -> list[list[Standing]]:
    """Ranks that wait at the same point of the same step together, the largest group first."""
    found: dict[tuple[str, str], list[Standing]] = {}
    for each in waiting:
        found.setdefault((each.waits_in, each.doing), []).append(each)
    return sorted(found.values(), key=len, reverse=True)


def _away(standing: Standing) -> str:
    who, last = standing.who(), f"it was last {_where(standing)}"
    match standing.state:
        case "ended":
            return f"{who} has ended; {last}"
        case "stopped":
            return f"{who} is stopped (by SIGSTOP or a debugger; SIGCONT lets it go on); {last}"
        case "silent":
            return f"{who} does not answer (a call outside of Python that never returns?); {last}"
    if standing.loading:
        return f"{who} waits {standing.doing} for its loaders, which owe it samples {standing.loading}"
    return f"{who} stands {_where(standing)}"


def _where(standing: Standing) -> str:
    return standing.doing + (f", at {standing.place}" if standing.place else "")


def _waiting(group: Sequence[Standing]) -> str:
    return f"{_ranks([each.rank for each in group])} wait{'s' * (len(group) == 1)} in {group[0].waits_in}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
