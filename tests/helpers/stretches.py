"""A model's work cut into stages one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.graph.assignment import Assignment
from stretto.graph.stages import Stages, Work, stages_of


def cut_at(work: Work, starts: Sequence[int]) -> Stages:
    """The stages after the first begin at ``starts``."""
    return stages_of(work, Assignment.stretches(len(work.nodes), starts))
