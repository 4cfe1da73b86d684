"""A model cut as its task names it has the numbers of one device, as when the cut was found."""

from __future__ import annotations

import pytest

from parity import Figures, check, prove
from stretto.launch import LocalLauncher

NAMED = (
    ("tp=2,microbatches=2", {"tensor": "person.0=column+person.2=row+thing.0=whole"}),
    ("pp=3,microbatches=3", {"cuts": "person.4+thing.0"}),
    ("branch=2,microbatches=2", {"towers": "thing+person"}),
    pytest.param("branch=2,pp=2,microbatches=2", {"towers": "thing+person"}, marks=pytest.mark.matrix),
)


@pytest.mark.parametrize(("plan", "sets"), NAMED)
def test_a_cut_that_is_named_has_the_numbers_of_one_device(
    launcher: LocalLauncher, figures: Figures, plan: str, sets: dict[str, str]
) -> None:
    check(prove(launcher, "towers", (plan,), sets), f"towers {plan}", figures)
