"""What a member hands to the writer: private copies, so that training may go on at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.checkpoint.names import is_word
from stretto.state import Slice
from stretto.state.source import private_copy


@dataclass(frozen=True)
class Snapshot:
    """One member's part of one save.

    ``token`` is the same on every member of the save and new for each attempt. Exactly one of ``members`` has
    ``committer`` set; its ``meta`` (JSON) goes into the manifest, the others' is not looked at. ``slices``
    are copies that nobody writes to any more (:func:`snapshot_slices`). Of the older checkpoints that of the
    step ``pinned`` stays, besides the newest.
    """

    step: int
    token: str
    member: str
    members: tuple[str, ...]
    committer: bool
    slices: tuple[Slice, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    pinned: int | None = None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"expected a step of 0 or more, got {self.step}")
        for word in (self.token, *self.members):
            if not is_word(word):
                raise ValueError(f"a member or token is made of letters, digits, '.', '_', '-'; got {word!r}")
        if self.member not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"member {self.member!r} must be one of the members, each once: {self.members}")


def snapshot_slices(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Copies, to private memory on the CPU, of the slices that this member answers for.

    This is all that training waits for in a save. Slices that another member owns are left out, for they
    are not written here.
    """
    return tuple(replace(piece, data=private_copy(piece.data)) for piece in slices if piece.owner)
