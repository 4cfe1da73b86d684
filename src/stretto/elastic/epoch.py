"""A membership epoch: a fixed set of members between two changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MembershipEpoch:
    """Who takes part, and where they meet. A member's rank is its place in ``members`` and lasts this epoch only.

    Args:
        number: counts the epochs of a job from 1.
        members: ids in rank order.
        store: where the members' group meets, ``file:///path`` or ``tcp://host:port``; new for each epoch.
        attempt: how often the run was started, from 1: a resume and a restart count.
    """

    number: int
    members: tuple[str, ...]
    store: str
    attempt: int = 1

    def rank_of(self, member: str) -> int:
        """The member's rank in this epoch. Raises ValueError for a stranger."""
        return self.members.index(member)

    def to_message(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "number": self.number,
            "members": list(self.members),
            "store": self.store,
            "attempt": self.attempt,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> MembershipEpoch:
        """Back from :meth:`to_message`."""
        return cls(
            number=int(message["number"]),
            members=tuple(message["members"]),
            store=str(message["store"]),
            attempt=int(message["attempt"]),
        )
