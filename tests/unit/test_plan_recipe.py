"""Plans, recipes and meshes: what is read, what is refused and in which words."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from stretto.errors import PlanError, RecipeError, Refused
from stretto.mesh import Mesh
from stretto.plan import Plan
from stretto.recipe import Recipe


def test_a_plan_is_read_and_written() -> None:
    plan = Plan.parse(" dp=2, zero=3 ,microbatches=4")
    assert plan == Plan(dp=2, zero=3, microbatches=4)
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse("") == Plan()
    assert Plan.parse("zero=3", workers=3) == Plan(dp=3, zero=3)


@pytest.mark.parametrize("text", ["dp_replicate=2,dp_shard=2", "tp=2,sequence=true", "pp=2,schedule=interleaved"])
def test_a_plan_is_made_of_its_fields_values(text: str) -> None:
    plan = Plan.parse(text)
    assert Plan.of(asdict(plan)) == plan
    with pytest.raises(PlanError, match=r"unknown key 'ddp'; .*did you mean 'dp'"):
        Plan.of({**asdict(plan), "ddp": 2})
    with pytest.raises(PlanError, match="tp must be a whole number of at least 1, got '2'"):
        Plan.of({**asdict(plan), "tp": "2"})


def test_loaders_are_no_part_of_what_a_plan_computes() -> None:
    plan = Plan.parse("dp=2,loaders=3")
    assert plan.loaders == 3 and str(plan) == "dp=2,loaders=3" and plan.world_size == 2
    assert plan == Plan(dp=2) and str(Plan(dp=2)) == "dp=2"
    with pytest.raises(PlanError, match="loaders must be a whole number of at least 0"):
        Plan(loaders=-1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dpp=2", "did you mean 'dp'"),
        ("dp=two", "whole number"),
        ("dp", "as in dp=2"),
        ("dp=2,dp=3", "given twice"),
        ("dp=0", "at least 1"),
        ("dp=-1", "whole number"),
        ("zero=7", "zero must be 0, 1, 2 or 3"),
        ("tp=2,sequence=yes", "sequence must be true or false"),
        ("dp=2,sequence=true", "tp=1 cuts none; give tp too"),
        ("dp=4,dp_shard=2,zero=1", "which is zero=3"),
        ("dp=3,dp_shard=2", "must divide the 3"),
        ("dp=5,dp_replicate=2,dp_shard=2", "dp_replicate=2 times dp_shard=2"),
        ("dp_shard=0", "at least 1"),
        ("schedule=1f1b", "this plan has none"),
        ("branch=2,chunks=2", "branch alone has towers in their place"),
        ("pp=2,schedule=2f2b", "did you mean '1f1b'"),
        ("pp=2,schedule=interleaved,chunks=1", "several stages to each rank"),
        ("dp=2,zero=3,dp_shard=1", "cuts nothing"),
    ],
)
def test_a_plan_that_means_nothing_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        Plan.parse(text)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, Refused)


@pytest.mark.parametrize("text", ["cp=4", "ep=2"])
def test_what_is_not_built_yet_is_refused_by_name(text: str) -> None:
    with pytest.raises(Refused, match=f"{text.split('=')[0]}.*not built yet"):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("plan", "workers", "becomes"),
    [
        ("dp=2,zero=3", 3, "dp=3,zero=3"),
        ("dp=2,zero=1,microbatches=2", 1, "dp=1,zero=1,microbatches=2"),
        ("dp_replicate=2,dp_shard=2", 6, "dp_replicate=3,dp_shard=2"),
        ("dp_replicate=2,dp_shard=2", 2, "dp=2,zero=3"),
        ("dp_replicate=2,dp_shard=2", 3, "dp=3,zero=3"),
        ("dp=2,pp=2,tp=2,microbatches=3", 4, "dp=1,tp=2,pp=2,microbatches=3"),
        ("tp=2,sequence=true", 6, "dp=3,tp=2,sequence=true"),
        ("tp=2,sequence=true", 3, "dp=3"),
        ("pp=2,schedule=gpipe,microbatches=3", 3, "dp=3,microbatches=3"),
        ("branch=2,schedule=gpipe", 4, "dp=2,branch=2,schedule=gpipe"),
        ("dp=2,branch=2,pp=2,schedule=interleaved,chunks=3", 4, "dp=1,pp=2,branch=2,schedule=interleaved,chunks=3"),
        ("branch=2,pp=2,schedule=interleaved", 2, "dp=1,pp=2,schedule=interleaved,chunks=2"),
        ("branch=3,pp=2,schedule=interleaved", 3, "dp=1,branch=3"),
        ("branch=3,pp=2,schedule=gpipe", 4, "dp=2,pp=2,schedule=gpipe"),
        ("branch=2,pp=4", 4, "dp=1,pp=4"),
        ("branch=2,pp=4,tp=2", 8, "dp=1,pp=4,branch=2"),
        ("branch=2,pp=2,schedule=gpipe,microbatches=2", 3, "dp=3,microbatches=2"),
    ],
)
def test_a_plan_on_other_workers(plan: str, workers: int, becomes: str) -> None:
    assert str(Plan.parse(plan).on(workers)) == becomes


def test_workers_and_plan_must_agree() -> None:
    with pytest.raises(PlanError, match=r"needs 2 worker\(s\), got --workers 3"):
        Plan.parse("dp=2", workers=3)


def test_a_mesh_places_ranks_row_major() -> None:
    mesh = Mesh((("a", 2), ("b", 3), ("c", 1)))
    assert mesh.size == 6
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(6)] == [
        (0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0),
    ]  # fmt: skip
    assert mesh.describe(4) == "a=1, b=1"
    assert mesh.degree("nowhere") == 1
    with pytest.raises(ValueError, match="outside"):
        mesh.coordinates(6)


def test_the_everyday_spelling_chooses_the_axis() -> None:
    assert Plan(dp=4).mesh.axes == (("branch", 1), ("pp", 1), ("dp_replicate", 4), ("dp_shard", 1), ("tp", 1))
    assert Plan(dp=4, zero=3).mesh.axes == (("branch", 1), ("pp", 1), ("dp_replicate", 1), ("dp_shard", 4), ("tp", 1))
    assert Plan(dp=4, zero=1).mesh.axes == (("branch", 1), ("pp", 1), ("dp_replicate", 4), ("dp_shard", 1), ("tp", 1))


@pytest.mark.parametrize("text", ["dp_replicate=2,dp_shard=2", "dp=4,dp_shard=2", "dp=4,dp_replicate=2"])
def test_hybrid_sharding_has_one_meaning_however_it_is_spelt(text: str) -> None:
    plan = Plan.parse(text)
    assert plan == Plan(dp=4, zero=3, dp_shard=2)
    assert str(plan) == "dp_replicate=2,dp_shard=2" and Plan.parse(str(plan)) == plan
    assert plan.mesh.lines("dp_shard") == ((0, 1), (2, 3))
    assert plan.mesh.lines("dp_replicate") == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"steps": True}, "steps"),
        ({"keep": 0}, "keep"),
        ({"clip": -1.0}, "clip must be a positive number"),
        ({"precision": "fp23"}, "did you mean 'fp32'"),
        ({"sync": "local"}, "not built yet"),
        ({"seed": -1}, "seed"),
        ({"eval_batch": 0}, "eval_batch"),
    ],
)
def test_a_recipe_names_the_field_that_is_wrong(fields: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Recipe(**{"batch": 4, "steps": 2, **fields})  # type: ignore[arg-type]


def test_towers_in_stages_lie_tower_by_tower() -> None:
    plan = Plan.parse("branch=2,pp=2,dp=2,microbatches=4")
    assert plan.world_size == 8 and plan.line == 4 and (plan.schedule, plan.chunks) == ("1f1b", 1)
    assert Plan.parse(str(plan)) == plan
    assert plan.mesh.lines("branch", "pp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert plan.mesh.lines("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert plan.mesh.describe(5) == "branch=1, pp=0, dp_replicate=1"
    assert Plan.parse("branch=2,pp=2,schedule=interleaved").chunks == 2


def test_tensor_parallel_ranks_are_innermost_and_multiply() -> None:
    plan = Plan.parse("dp=2,tp=3,microbatches=2")
    assert plan.world_size == 6 and str(plan) == "dp=2,tp=3,microbatches=2"
    assert plan.mesh.lines("tp") == ((0, 1, 2), (3, 4, 5))
    assert plan.mesh.lines("dp_replicate", "dp_shard") == ((0, 3), (1, 4), (2, 5))
    assert Plan.parse("tp=2", workers=6) == Plan(dp=3, tp=2)
    assert plan.on(3) == Plan(dp=1, tp=3, microbatches=2) and plan.on(4) == Plan(dp=4, microbatches=2)
    assert str(Plan.parse("dp=2,tp=2,pp=2,recompute=full")) == "dp=2,tp=2,pp=2,recompute=full"
