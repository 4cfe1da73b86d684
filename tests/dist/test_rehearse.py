"""A rank that runs alone does what it does among others: the same calls, the same messages, as much memory."""

from __future__ import annotations

import os
import signal
import time
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stretto.choose import UNSEEN, Planner, fitting
from stretto.corrections import Corrections
from stretto.doctor.links import measure_links
from stretto.errors import Interrupted, UserError
from stretto.launch import LocalLauncher
from stretto.launch.job import Job, result_of
from stretto.plan import Plan
from stretto.planner.risk import probability_over, rehearsed
from stretto.planner.tables import LinkTable
from stretto.rehearse import Rehearsals, Rehearsed, _Player

ROOT = Path(__file__).resolve().parents[2]
GPT = str(ROOT / "examples" / "gpt")
SETS = {"depth": "2", "width": "32", "heads": "2", "context": "16", "batch": "7", "steps": "9"}
MATRIX = pytest.mark.matrix  # the same code as those beside them
FREE = LinkTable("none", False, {("all_reduce", 2, 1): ((64, 1e-9),), ("message", 2, 1): ((64, 1e-9),)})


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[Rehearsals]:
    yield Rehearsals.of(Path(GPT), SETS, cores=1)


@pytest.mark.parametrize(
    "plan",
    [
        *("dp=2", "dp=3,zero=2", "pp=2,microbatches=3"),
        *(pytest.param(plan, marks=MATRIX) for plan in ("dp=1", "dp=2,zero=1,microbatches=2", "dp=2,zero=3", "tp=2")),
    ],
)
def test_a_rank_alone_makes_the_calls_that_it_makes_among_others(
    launcher: LocalLauncher, rehearsals: Rehearsals, plan: str
) -> None:
    parsed = Plan.parse(plan)
    alone = rehearsals.run(parsed)
    payload = {"task": GPT, "sets": SETS, "plan": plan, "assignment": alone.assignment}
    job = Job("rehearsing:calls", payload, parsed.world_size, python_path=(str(ROOT / "tests" / "helpers"),))
    result = launcher.run(job)
    assert result.exit_code == 0, result.failure
    assert not alone.refused and {len(step) for step in alone.steps} == {parsed.world_size}
    for events, really in zip(alone.steps[-1], result.results.values(), strict=True):
        assert really is not None
        assert sum(event[0] == "begin" for event in events) == really["collectives"]
        assert [event[3] for event in events if event[0] == "send"] == really["sent"]
        assert sum(event[1] for event in events if event[0] == "work") > 0
    assert alone.play(FREE).seconds > 0, "the ranks' notes fit together"
    assert min(alone.memory_bytes) > 2**20


def test_over_sockets_a_gather_of_parts_is_one_call_as_it_was_measured(rehearsals: Rehearsals) -> None:
    """Gloo makes it of broadcasts that go at once, each way; played one after another they would take twice as long."""
    found = dataclasses.replace(rehearsals, apart=True).run(Plan.parse("dp=2,zero=2"))
    kinds = [event[2:4] for event in found.steps[-1][1] if event[0] == "begin"]
    assert ("all_gather", (0, 1)) in kinds and "broadcast" not in {kind for kind, _ in kinds}


def test_over_sockets_a_rank_needs_what_gloo_does(
    rehearsals: Rehearsals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured of 64 MB from two members: a gather takes the whole once more, adding up and scattering a part."""
    apart = Rehearsals.of(Path(GPT), SETS, apart=True, cores=1)
    assert apart.imports_bytes < rehearsals.imports_bytes - 2**20, "the group itself, with its threads and its store"

    def carried(of: Rehearsals, plan: str) -> tuple[list[int], list[int]]:
        """Bytes, and those of the gathers that were noted."""
        told = tmp_path / "told"
        told.write_text("")

        def carry(num_bytes: int) -> None:
            with told.open("a") as file:
                file.write(f"{os.getpid()} {num_bytes}\n")

        monkeypatch.setattr("stretto.comm.echo._carry", carry)
        steps = of.run(Plan.parse(plan)).steps
        gathers = [event[4] for step in steps for event in step[0] if event[:1] == ("begin",) and "gather" in event[2]]
        return [int(line.split()[1]) for line in told.read_text().splitlines()], gathers

    sizes, gathers = carried(apart, "dp=2,zero=1")
    assert gathers and set(gathers) <= set(sizes)
    assert carried(rehearsals, "dp=2,zero=1")[0] == []


def test_ranks_of_one_host_run_at_once_and_other_hosts_after_them(
    rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each has the threads that it will have, and nobody else's work beside it."""
    there, most = list[_Player](), list[int]()
    begin, end = _Player.__init__, _Player.end

    def begins(self: _Player, body: Callable[[Any], None]) -> None:
        begin(self, body)
        there.append(self)
        most.append(len(there))

    def ends(self: _Player) -> None:
        end(self)
        there.remove(self)

    monkeypatch.setattr(_Player, "__init__", begins)
    monkeypatch.setattr(_Player, "end", ends)
    found = dataclasses.replace(rehearsals, apart=True, per_host=2).run(Plan.parse("dp=3,zero=1"))
    assert most == [1, 2, 1] and [len(step) for step in found.steps] == [3] * len(found.steps)
    assert found.play(FREE).seconds > 0, "the ranks' notes fit together"


def test_the_rank_that_looks_whether_the_graph_is_the_model_needs_no_more_memory_than_the_others() -> None:
    """It looks for all, at the whole model with its gradients: in a process of its own."""
    sets = {**SETS, "depth": "4", "width": "512"}
    found = Rehearsals.of(Path(GPT), sets, cores=1).run(Plan.parse("tp=2"))
    (one, _, _), (other, _, _) = found.memory
    assert one < 1.3 * other, f"{one / 1e6:.0f} and {other / 1e6:.0f} MB once laid out"


def test_a_plan_that_does_not_fit_the_task_is_refused_with_the_reason(rehearsals: Rehearsals) -> None:
    found = Planner(rehearsals, FREE).predict(Plan.parse("branch=2"))
    assert found.refused.startswith("plan: branch=2") and found.to_json() == {
        "plan": "dp=1,branch=2",
        "refused": found.refused,
    }


def test_a_rank_that_dies_is_told(rehearsals: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.rehearse.assemble", lambda *_, **__: [][0])
    with pytest.raises(UserError, match="a rank that was run alone ended by exit code 1"):
        rehearsals.run(Plan.parse("dp=2"))


@MATRIX
def test_links_are_measured_for_each_number_of_members(launcher: LocalLauncher) -> None:
    table = measure_links(2, launcher)
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "message"}
    assert {kind for kind, *_ in table.curves} == kinds and table.transport == "shared memory" and not table.background
    for kind in kinds:
        small, large = table.curves[kind, 2, 1][0], table.curves[kind, 2, 1][-1]
        assert 0 < small[1] < large[1] < 10 and small[0] < large[0], kind


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_workers_that_have_no_safe_points(
    launcher: LocalLauncher, number: signal.Signals
) -> None:
    helpers = (str(ROOT / "tests" / "helpers"),)
    began = time.monotonic()
    result = launcher.run(
        Job("rehearsing:sleeps", python_path=helpers, safe_points=False),  # one worker: one signal
        lambda member, event: os.kill(os.getpid(), number),
    )
    assert time.monotonic() - began < 20 and result.exit_code == 128 + number
    with pytest.raises(Interrupted) as told:
        result_of(result, "nothing")
    assert told.value.exit_code == 128 + number and str(told.value) == "interrupted"


def test_what_fits_is_chosen_before_what_is_faster_and_saving_comes_where_nothing_fits(rehearsals: Rehearsals) -> None:
    told: list[str] = []
    found = Planner(rehearsals, FREE).choose(1, tell=lambda one: told.append(one.plan))
    assert told == ["dp=1"] == [one.plan for one in found] and found[0].risk == 0.0
    told.clear()
    found = Planner(rehearsals, FREE, limit=2**20).choose(1, tell=lambda one: told.append(one.plan))
    assert "dp=1,recompute=selective" in told and "dp=1,microbatches=4,recompute=full" in told
    assert all(one.risk > 0.99 for one in found)


def test_looking_ends_with_its_time_once_something_fits(rehearsals: Rehearsals) -> None:
    found = Planner(rehearsals, FREE).choose(2, seconds=0.0)
    assert [one.plan for one in fitting(found)] == ["dp=2"] and len(found) > 5
    assert all(one.refused.startswith(UNSEEN) for one in found[1:])


def test_what_earlier_runs_teach_corrects_what_is_predicted(rehearsals: Rehearsals) -> None:
    plain, corrected = (
        Planner(rehearsals, FREE, corrections=factors).predict(Plan())
        for factors in (Corrections(), Corrections(work=100.0, memory=2.0, runs=1))
    )
    assert corrected.seconds > 20 * plain.seconds and corrected.work == pytest.approx(corrected.seconds)
    assert 1.5 * plain.memory_bytes < corrected.memory_bytes < 2.5 * plain.memory_bytes


def test_a_plan_that_cuts_the_graph_is_trusted_less_far_and_given_more_room(rehearsals: Rehearsals) -> None:
    class Fixed:
        def run(self, plan: Plan) -> Rehearsed:
            return dataclasses.replace(found, plan=str(plan))

    step = ((("work", 1.0),),)
    found = Rehearsed("", (step,), ((100, 200, 1000), (100, 200, 900)), samples=1)
    whole, cut = (
        Planner(cast(Any, Fixed()), FREE, limit=1100.0).predict(Plan.parse(plan)).room for plan in ("dp=1", "tp=2")
    )
    assert whole and cut and (whole.laid_out, whole.kept) == (cut.laid_out, cut.kept) == (100, 200)
    for which, room in ((False, whole), (True, cut)):
        trust = rehearsed(False, which, "C library")
        assert room.most == int(trust.most(1000)) and room.spread == trust.spread_of(trust.most(1000))
    assert whole.risk < 0.05 and 0.2 < cut.risk < 0.5, "a limit a tenth over what was seen in a few steps"


def test_batches_of_several_shapes_get_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an allocator that keeps its heap in order nothing else breaks it up."""
    monkeypatch.setattr("stretto.choose.allocator", lambda: "tcmalloc")
    found = [Rehearsed("", (((("work", 1.0),),),), ((1, 2, 1000),), samples=1, varied=varied) for varied in (False, True)]
    rooms = [Planner(cast(Any, SimpleNamespace(run=lambda _, one=one: one)), FREE).predict(Plan()).room for one in found]
    assert rooms[0] and rooms[1] and 1000 < rooms[0].most < rooms[1].most


def test_there_is_room_for_the_traces_of_shapes_to_come() -> None:
    """Sentences of other lengths are other shapes, and of a cut model each has a trace that is kept."""
    bert = ROOT / "tests" / "tasks" / "bert.py"
    sets = {"batch": "3", "length": "30", "size": "200"}
    # The first one is told of what the task's libraries take, too.
    _, few, many = (Rehearsals.of(bert, {**sets, "steps": steps}, cores=1) for steps in ("7", "7", "64"))
    more = {}
    for plan in ("tp=2", "dp=2"):
        sizes = [one.run(Plan.parse(plan)).memory_bytes[0] for one in (few, many)]
        more[plan] = sizes[1] - sizes[0]
    assert 10e6 < more["tp=2"] < 60e6 and more["dp=2"] < 7e6  # a longer batch takes a little everywhere


def test_there_is_room_for_the_longest_sample_that_comes_later() -> None:
    """One of 40 is long; the first seven batches of two don't have it, the next 13 do."""
    sets = {"longest": "100_000", "width": "32", "asked": os.devnull}
    besides = ROOT / "tests" / "tasks" / "besides.py"
    few, many = (Rehearsals.of(besides, {**sets, "steps": steps}, cores=1).run(Plan()) for steps in ("7", "20"))
    assert few.varied and many.varied
    assert many.memory_bytes[0] - few.memory_bytes[0] > 2 * 100_000 * 32 * 4


def test_the_probability_is_a_half_at_the_limit_and_grows() -> None:
    assert probability_over(100.0, 100.0, 0.03) == 0.5 and probability_over(100.0, None, 0.03) == 0.0
    assert probability_over(90.0, 100.0, 0.03) < 0.01 < 0.99 < probability_over(110.0, 100.0, 0.03)
    assert probability_over(90.0, 100.0, 0.1) > 0.1
