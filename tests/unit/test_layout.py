"""What a task's ``layout()`` says is followed, or refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import Refused, TaskError
from stretto.explain import Explained, explain
from stretto.graph.cut import Cut, plan_cut, report
from stretto.graph.rules import read
from stretto.graph.trace import trace
from stretto.graph.wishes import wishes_of
from stretto.layout import Layout, check_layout
from stretto.plan import Plan
from stretto.task import load_task

TOWERS = Path(__file__).resolve().parents[1] / "tasks" / "towers.py"


class Three(nn.Module):
    """Of the two axes between three linears only one can be cut: both meet in the second weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.on, self.out = nn.Linear(8, 12), nn.Linear(12, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, 8], likewise what comes out."""
        return self.out(self.on(self.into(x).relu()).relu())


def cut(model: nn.Module, wishes: dict[str, Any], degree: int = 2) -> tuple[dict[str, str], Cut]:
    traced = trace(model, (torch.randn(3, 8),), {})
    found = plan_cut(read(traced), traced, degree, wishes_of(Layout(wishes), model))
    return dict(report(found, traced)), found


def explained(plan: str, **sets: str) -> Explained:
    return explain(load_task(TOWERS, sets), Plan.parse(plan))


def test_an_axis_that_is_wished_goes_before_a_larger_one() -> None:
    large, small = "along an axis of 12", "along an axis of 6"
    assert cut(Three(), {})[0]["on.weight"] == f"dimension 1 cut {large}"
    for wish in ({"on": "column"}, {"on.weight": 0}, {"ou*": "row"}, {"into": "whole"}):
        said, _ = cut(Three(), wish)
        assert said["on.weight"] == f"dimension 0 cut {small}" and said["on.bias"] == f"dimension 0 cut {small}", wish
        assert said["into.weight"].startswith("whole"), wish
    assert "layout() wants into.weight whole" in cut(Three(), {"into": "whole"})[0]["into.weight"]


def test_a_model_s_own_plan_is_followed_and_what_of_it_can_t_be_is_said() -> None:
    model = Three()
    model.tp_plan = {"on": "colwise", "out": "colwise_rep", "into": "all_reduce"}  # type: ignore[assignment]
    said, found = cut(model, {})
    assert said["on.weight"] == "dimension 0 cut along an axis of 6"
    (note, other) = found.notes
    assert note.startswith("the model's own plan wants out.weight cut along dimension 0, and that can't be: it is in")
    assert "out.bias" in other
    said, _ = cut(model, {"into": "column"})  # the task has the last word
    assert said["on.weight"] == "dimension 1 cut along an axis of 12"


def test_a_llama_is_cut_as_its_own_plan_says() -> None:
    found = explain(load_task(TOWERS.parent / "llama.py"), Plan.parse("tp=2"))
    cuts = {row.name.split(".", 3)[-1]: row.why[:11] for row in found.parameters if ".layers.1." in row.name}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert cuts[f"{name}.weight"] == "dimension 0", cuts
    assert cuts["self_attn.o_proj.weight"] == cuts["mlp.down_proj.weight"] == "dimension 1"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"onn": "column"}, "names 'onn', and no parameter with such a dimension is called so.*did you mean 'on'"),
        ({"on": 2}, "names 'on'"),
        ({"out": 0}, "wants out.weight cut along dimension 0, and that can't be: it is in the model's output"),
        ({"into": 0, "on": 0}, "a tensor would be cut twice; take it out of"),
    ],
)
def test_a_wish_that_can_t_be_is_refused_with_the_reason(wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        cut(Three(), wishes)


def test_a_wish_along_fewer_than_the_ranks_is_refused() -> None:
    with pytest.raises(Refused, match="its 6 are fewer than tp=7"):
        cut(Three(), {"on": 0}, degree=7)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (SimpleNamespace(), "must return a stretto.Layout, got SimpleNamespace"),
        (Layout({"a": "columns"}), "'a' cut along 'columns'; expected the number of a dimension, or one of 'column'"),
        (Layout({"a": True}), "cut along True"),
        (Layout(cuts="blocks.1"), "'blocks.1' in its cuts; expected a list"),
        (Layout(towers=("one", "two")), "'one' in its towers; expected a list"),
    ],
)
def test_what_is_no_layout_is_a_mistake_of_the_task(value: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        check_layout(value)


def test_stages_begin_where_they_are_named() -> None:
    found = explained("pp=3", cuts="person.4+thing.0")
    assert [(row.first, row.last) for row in found.stages][:2] == [("person.0", "person.3"), ("person.4", "person.6")]
    assert found.stages[2].first == "thing.0"


def test_towers_run_where_they_are_named() -> None:
    for named in ("person+thing", "thing+person"):
        found = explained("branch=2", towers=named)
        ranks = {row.first: row.rank for row in found.stages if row.first}
        assert ranks["person.0"] == named.split("+").index("person"), found.stages
        assert ranks["thing.0"] == named.split("+").index("thing")
        assert found.stages[-1].rank == 1, "they meet at the last rank"


def test_towers_that_are_named_are_cut_into_stages_too() -> None:
    for named in ("person+thing", "thing+person"):
        found = explained("branch=2,pp=2", towers=named)
        for module in named.split("+"):
            ranks = {row.rank for row in found.stages if row.first.startswith(module)}
            assert {rank // 2 for rank in ranks} == {named.split("+").index(module)}, found.stages
        assert {row.rank for row in found.stages} == {0, 1, 2, 3} and found.stages[-1].rank == 3
    assert not found.notes
    (note,) = explained("branch=2,pp=2", towers=named, cuts="person.2").notes
    assert note.startswith("the cuts of layout() are for pp alone, and inactive")


@pytest.mark.parametrize(
    ("plan", "sets", "says"),
    [
        ("pp=2", {"cuts": "person.2+thing.0"}, "names 2 cuts .* so 3 stages; the plan has 2"),
        ("pp=2", {"cuts": "thign.0"}, "cuts at 'thign.0', where the model computes nothing; did you mean 'thing.0'"),
        ("pp=2", {"cuts": "person.0"}, "no stage can begin: it is the first"),
        ("pp=3", {"cuts": "thing.0+person.2"}, "cuts at 'person.2' after 'thing.0', which runs no earlier"),
        ("branch=3", {"towers": "person+thing"}, "names 2 towers, and the plan has branch=3"),
        ("branch=2", {"towers": "person+thign"}, r"has \['thign'\] as a tower, and no operation is theirs"),
        ("branch=2,pp=9", {"towers": "person+thing"}, "cuts each tower into 9 stages, and thing can be cut into"),
        ("branch=2", {"towers": "person.0+person.2"}, "has person.2 in the tower .* needs what comes of another"),
    ],
)
def test_names_that_make_no_plan_are_refused(plan: str, sets: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=says):
        explained(plan, **sets)
