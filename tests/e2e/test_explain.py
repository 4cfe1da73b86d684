"""``stretto explain``: what a plan cuts of a model, before anything is launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def explain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", "explain", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_each_parameter_is_listed_with_its_reason() -> None:
    told = explain("examples/gpt", "--plan", "tp=3", "--set", "depth=1", "--json")
    assert told.returncode == 0, told.stderr
    rows = {row["name"]: row for row in json.loads(told.stdout)["parameters"]}
    fused = rows["blocks.0.query_key_value.weight"]
    assert (fused["why"], fused["share"]) == ("dimension 0 cut along an axis of 3", 1 / 3)
    table = rows["embedding.weight"]
    assert (table["why"], round(table["share"], 2)) == ("dimension 0 cut along an axis of 256", 0.34), "86, 85 and 85"
    assert rows["position.weight"]["share"] == 1
    assert "an embedding looks the same rows up whatever the input" in rows["position.weight"]["why"]


@pytest.mark.matrix
def test_a_head_that_is_whole_has_the_reason_of_its_loss() -> None:
    for kind, why in (("gather", "dimension 0 cut along an axis of 13"), ("masked", "(the loss can't be traced: ")):
        told = explain("tests/tasks/word_losses.py", "--plan", "tp=2", "--set", f"kind={kind}", "--json")
        assert told.returncode == 0, told.stderr
        rows = {row["name"]: row for row in json.loads(told.stdout)["parameters"]}
        assert why in rows["head.weight"]["why"] and why in rows["head.bias"]["why"]


def test_stages_have_their_cost_and_what_they_send_and_a_picture(tmp_path: Path) -> None:
    sets = ("--set", "depth=2", "--set", "context=16")
    drawn = tmp_path / "plan.svg"
    told = explain("examples/gpt", "--plan", "pp=2,microbatches=4", *sets, "--picture", str(drawn), "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    first, last = found["stages"]
    assert (first["first"], last["last"]) == ("embedding", "head") and first["sends"].keys() == {"1"}
    rows = {row["name"]: row["stages"] for row in found["parameters"]}
    assert rows["embedding.weight"] == [0, 1], "the table at both ends is one parameter of both stages"
    assert rows["blocks.0.mlp_up.weight"] == [0] and rows["norm.weight"] == [1]
    times = [stage["forward_seconds"] + stage["backward_seconds"] for stage in found["stages"]]
    assert min(times) > 0 and 0.05 < found["bubble"] < 0.6
    assert drawn.read_text(encoding="utf-8").startswith("<svg") and "pp=2" in drawn.read_text(encoding="utf-8")


def test_what_does_nothing_is_said_with_the_reason() -> None:
    told = explain("examples/gpt", "--plan", "dp=1,zero=2,microbatches=2", "--set", "depth=1")
    assert told.returncode == 0, told.stderr
    assert "zero=2                  INACTIVE: with dp=1 there is no other rank" in told.stdout
    assert "microbatches=2          active: " in told.stdout


@pytest.mark.matrix
def test_a_sequence_is_named_by_its_length_or_why_there_is_none() -> None:
    told = explain("examples/gpt", "--plan", "tp=2,sequence=true", "--set", "depth=1", "--set", "context=24")
    assert told.returncode == 0, told.stderr
    assert "sequence=true           active: " in told.stdout and "beside batch and features, of 24" in told.stdout
    told = explain("examples/gpt", "--plan", "tp=3,sequence=true", "--set", "depth=1", "--set", "context=2")
    assert "sequence=true           INACTIVE: its sequence of 2 is shorter than tp=3" in told.stdout, told.stderr


def test_a_picture_of_no_pipeline_is_one_line() -> None:
    told = explain("examples/gpt", "--plan", "dp=2", "--picture", "plan.svg")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("stretto: --picture draws the schedule of a pipeline, and plan dp=2 has none")


def test_towers_are_told_with_their_ranks_and_what_makes_them_wait(tmp_path: Path) -> None:
    told = explain("tests/tasks/branches.py", "--plan", "branch=2", "--set", "kind=siamese", "--set", "rate=0.3")
    assert told.returncode == 0, told.stderr
    assert "branch=2                active: towers that don't depend on each other, on 2 ranks" in told.stdout
    rows = [line.split()[:2] for line in told.stdout.splitlines() if "  branch=" in line and " ms " in line]
    assert sorted(rank for _, rank in rows[:2]) == ["branch=0", "branch=1"] and rows[-1] == ["2", "branch=1"]
    assert "both draw random numbers, so forward of the second waits for the first" in told.stdout
    many = ("tests/tasks/towers.py", "--plan", "branch=2,pp=2,microbatches=4")
    told = explain(*many, "--picture", str(tmp_path / "plan.svg"))
    assert "pp=2                    active: each tower's stages on 2 ranks" in told.stdout, told.stderr
    assert "branch=2                active: towers that don't depend on each other, on 2 times 2 ranks" in told.stdout
    rows = [line.split()[1] for line in told.stdout.splitlines() if "  branch=" in line and " ms " in line]
    assert set(rows) == {f"branch={branch},pp={pp}" for branch in (0, 1) for pp in (0, 1)}
    assert rows[-1] == "branch=1,pp=1" and "rank 3</text>" in (tmp_path / "plan.svg").read_text()
    chain = explain("tests/tasks/skips.py", "--plan", "branch=2")
    assert chain.returncode and "finds no towers for 2 ranks: everything depends on what comes" in chain.stderr


def test_a_model_that_its_graph_does_not_compute_is_refused_as_a_run_would(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    text = (ROOT / "tests" / "tasks" / "skips.py").read_text(encoding="utf-8")
    end = "        return found\n"
    assert end in text
    hook = "        if found.requires_grad:\n            found.register_hook(lambda gradient: 2 * gradient)\n"
    task.write_text(text.replace(end, f"{hook}{end}"), encoding="utf-8")
    told = explain(str(task), "--plan", "pp=2")
    assert told.returncode and "the gradient of enter.weight differs" in told.stderr, told.stderr


@pytest.mark.parametrize("precision", ["bf16", pytest.param("bf16-autocast", marks=pytest.mark.matrix)])
def test_a_low_precision_is_traced_as_a_run_traces_it(precision: str) -> None:
    """Inputs in numbers, and a BatchNorm, whose weights are in a lower type than its statistics."""
    told = explain("tests/tasks/cnn_skips.py", "--plan", "tp=2,pp=2", "--set", f"precision={precision}")
    assert told.returncode == 0, told.stderr
    assert "tp leaves 53% on a rank" in told.stdout
