"""``stretto plan --model``: what it prints, and how mistakes are told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stretto.choose import Choice, Room
from stretto.cli.main import main
from stretto.cli.plan_task import _refusals, nothing_fits
from stretto.planner.advise import _wait
from stretto.planner.described import read_model
from stretto.planner.hardware import Machines, find_device
from stretto.planner.mixed import as_the_worst

GPT = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304, "sequence": 2048}


def write(folder: Path, **changes: Any) -> str:
    file = folder / "gpt.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**GPT, **changes}.items() if value is not None))
    return str(file)


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_best_plans_in_under_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    text = plan("--model", file, "--on", "16xH100", "--batch", "128", capsys=capsys)
    assert len(text.splitlines()) <= 24
    found = json.loads(plan("--model", file, "--on", "16xH100", "--batch", "128", "--json", capsys=capsys))
    assert [one["seconds"] for one in found["plans"]] == sorted(one["seconds"] for one in found["plans"])
    for one in found["plans"]:
        assert one["plan"] in text
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        assert sum(one["memory"].values()) == pytest.approx(one["memory_bytes"])
        assert one["memory_bytes"] < 80e9
        assert 0 <= one["risk"] <= 0.2
        assert one["tokens_per_second"] == pytest.approx(128 * 2048 / one["seconds"])
        assert 0.05 < one["mfu"] < 0.9
    assert f"{found['candidates']:,} plans" in text
    assert found["judged"] < found["candidates"]
    best = found["plans"][0]["seconds"]
    changes = {one["what"]: one for one in found["changes"]}
    assert set(changes) == {"memory", "compute rate", "memory's rate", "links in a host", "links between hosts"}
    assert all(one["saves"] > -1e-9 and one["seconds"] < 1.01 * best for one in changes.values())
    assert found["binds"] == max(changes, key=lambda what: changes[what]["saves"]) == "compute rate"
    assert "2 takes" in text
    assert "what binds: compute rate" in text


def test_a_link_or_memory_may_bind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "slow.yaml"
    cluster.write_text("hosts:\n- {device: A100, count: 4, devices: 1, network_gb_per_second: 0.2}\n")
    slow = json.loads(plan("--model", write(tmp_path), "--on", str(cluster), "--batch", "8", "--json", capsys=capsys))
    assert slow["binds"] == "links between hosts"
    assert "links in a host" not in {one["what"] for one in slow["changes"]}
    tight = write(tmp_path, layers=60, hidden=6656, heads=52, sequence=4096)
    found = json.loads(plan("--model", tight, "--on", "16xA100", "--batch", "64", "--json", capsys=capsys))
    saves = {one["what"]: one["saves"] for one in found["changes"]}
    assert saves["memory"] > 0.02


def test_one_plan_is_explained_though_it_is_a_bad_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", write(tmp_path), "--on", "16xH100", "--batch", "128"]
    best = json.loads(plan(*options, "--json", capsys=capsys))["plans"][0]
    same = json.loads(plan(*options, "--explain", best["plan"], "--json", capsys=capsys))["plans"]
    assert same == [best]
    bad = "dp=1,pp=16,microbatches=4,schedule=gpipe"
    one = json.loads(plan(*options, "--explain", bad, "--json", capsys=capsys))["plans"][0]
    assert one["seconds"] > 2 * best["seconds"]
    assert one["parts"]["bubble"] > one["parts"]["compute"]
    text = plan(*options, "--explain", bad, capsys=capsys)
    assert bad in text
    assert "cp is planned but not built" not in text
    assert "cp is planned but not built" in plan(*options, "--explain", "dp=8,cp=2", capsys=capsys)
    big = ["--model", write(tmp_path, layers=96, hidden=8192, heads=64), "--on", "8xH100", "--batch", "8"]
    over = json.loads(plan(*big, "--explain", "dp=8", "--json", capsys=capsys))["plans"][0]
    assert over["risk"] > 0.99


def test_an_epoch_has_a_time_and_with_a_price_a_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", write(tmp_path), "--on", "8xH100", "--batch", "64", "--tokens", "1e9"]
    found = json.loads(plan(*options, "--price", "2", "--json", capsys=capsys))
    hours = 1e9 / found["plans"][0]["tokens_per_second"] / 3600
    assert found["epoch_hours"] == pytest.approx(hours)
    assert found["epoch_dollars"] == pytest.approx(hours * 2 * 8)
    assert "dollars" in plan(*options, "--price", "2", capsys=capsys)
    text = plan(*options, capsys=capsys)
    assert "an epoch of 1,000,000,000 tokens" in text
    assert "dollars" not in text


@pytest.mark.parametrize("explain", ["dp=2,pp=4,microbatches=8", "dp=8"])
def test_the_picture_is_an_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str], explain: str) -> None:
    file = tmp_path / "plan.svg"
    options = ["--model", write(tmp_path), "--on", "8xH100", "--batch", "64", "--explain", explain]
    plan(*options, "--picture", str(file), capsys=capsys)
    root = ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg")
    text = file.read_text()
    assert "GB" in text
    assert ("rank 3" in text) == ("pp" in explain)


def test_a_cluster_file_says_hosts_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("hosts:\n- {device: H100, count: 2, devices: 4, network_gb_per_second: 12.5}\n")
    text = plan("--model", write(tmp_path), "--on", str(cluster), "--batch", "64", capsys=capsys)
    assert "8 H100-SXM5-80GB in hosts of 4, 12.5 GB/s" in text


def test_hosts_of_several_kinds_are_used_as_far_as_they_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"

    def found(many: int, *words: str) -> Any:
        one = "{device: H100, count: 1}, {device: H100, count: 1, network_gb_per_second: 25}"  # of one kind
        cluster.write_text(f"hosts: [{one}, {{device: A100, count: {many}, devices: 4}}]")
        options = ["--model", write(tmp_path), "--on", str(cluster), "--batch", "256", *words]
        return plan(*options, capsys=capsys)

    fast = json.loads(plan("--model", write(tmp_path), "--on", "16xH100", "--batch", "256", "--json", capsys=capsys))
    few, many = json.loads(found(1, "--json")), json.loads(found(12, "--json"))
    assert few["plans"] == fast["plans"], "four slow devices would hold the others up"
    assert [one["hosts"].count(" and ") for one in few["hosts"]] == [1, 0, 0]
    assert many["plans"][0]["seconds"] == min(one["seconds"] for one in many["hosts"]) < fast["plans"][0]["seconds"]
    text = found(12)
    assert "64 A100-SXM4-80GB in hosts of 4, 25 GB/s" in text and "each counts as the slowest and smallest" in text
    assert "64 A100-SXM4-80GB" in found(12, "--explain", "dp=64") and "on 48 A100" in found(12, "--explain", "dp=48")


def test_devices_of_several_kinds_count_as_the_worst_of_each_figure() -> None:
    slow, fast = Machines(find_device("A100"), 8, 4, 50e9), Machines(find_device("H100"), 16, 6, 25e9)
    small = dataclasses.replace(fast, device=dataclasses.replace(fast.device, memory_bytes=1e9))
    found = as_the_worst([small, slow])
    assert (found.count, found.per_host, found.network_rate) == (24, 2, 25e9)
    assert (found.device.name, found.device.memory_bytes) == (slow.device.name, 1e9)
    assert found.device.peak["bf16"] == slow.device.peak["bf16"]
    assert as_the_worst([fast]) == fast


def test_what_a_model_leaves_out_is_what_is_usual(tmp_path: Path) -> None:
    plain = read_model(Path(write(tmp_path)))
    assert (plain.model.kv_heads, plain.model.ffn, plain.model.tied, plain.precision) == (16, 8192, True, "bf16")
    said = {"kv_heads": 4, "ffn": 6000, "gated": True, "tied": False, "positions": 64, "precision": "fp8"}
    found = read_model(Path(write(tmp_path, **said)))
    assert {**vars(found.model), **vars(found)}.items() >= said.items()


@pytest.mark.parametrize("seconds", [7.0, 8.5, 9.5, 30.0])
def test_parts_add_up_to_what_events_say(seconds: float) -> None:
    parts = {"compute": 8.0, "messages of pp": 1.0, "bubble": 2.0}
    _wait(parts, seconds)
    assert sum(parts.values()) == pytest.approx(seconds)
    assert min(parts.values()) >= 0
    assert parts["compute"] == min(8.0, seconds)


def mistakes() -> list[Any]:
    def model(word: str, **changes: Any) -> Any:
        return pytest.param(changes, [], word, id=word[:30])

    def option(word: str, *arguments: str) -> Any:
        return pytest.param({}, list(arguments), word, id=word[:30])

    return [
        model("unknown key 'hiden'; did you mean 'hidden'?", hiden=3),
        model("layers is missing", layers=None),
        model("layers: input should be a valid integer", layers="many"),
        model("heads must be a multiple of kv_heads, got heads=16 and kv_heads=5", kv_heads=5),
        model("hidden must be a multiple of heads", hidden=2049),
        model("layers: input should be greater than or equal to 1, got 0", layers=0),
        model("precision: input should be 'bf16'", precision="bf17"),
        option("no device is known as 'H1000'; did you mean 'H100'?", "--on", "8xH1000"),
        option("expected COUNTxDEVICE", "--on", "H100"),
        option("whole hosts of 8", "--on", "12xH100"),
        option("at least one device", "--on", "0xH100"),
        option("can't be read", "--on", "no.yaml"),
        option("no such training system; did you mean 'nanotron'", "--software", "nanotrom"),
        option("--batch must be at least 1", "--batch", "0"),
        option("no plan has work for all of 232 devices", "--on", "232xH100", "--batch", "1"),
        option("--price needs --tokens", "--price", "2"),
        option("plan: unknown key 'dpp'", "--explain", "dpp=8"),
    ]


@pytest.mark.parametrize(("changes", "arguments", "word"), mistakes())
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], word: str
) -> None:
    given = {"--model": write(tmp_path, **changes), "--on": "8xH100", "--batch": "64"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert main(["plan", *(part for pair in given.items() for part in pair)]) == 2
    told = capsys.readouterr().err
    assert word in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hosts: []", "hosts"),
        ("- 1", "expected keys with values (hosts)"),
        ("hosts: [{device: H100, count: 2, devicez: 3}]", "unknown key 'hosts.0.devicez'; did you mean 'device"),
        ("hosts: [{device: H100, count: 2}, {device: A10x, count: 2}]", "no device is known as 'A10x'"),
        ("hosts: [", "is no YAML"),
    ],
)
def test_a_wrong_cluster_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, word: str) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(text)
    assert main(["plan", "--model", write(tmp_path), "--on", str(cluster), "--batch", "64"]) == 2
    told = capsys.readouterr().err
    assert word in told
    assert told.count("\n") == 1


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--on", "8xH100"]) == 2
    assert "--model and --batch are missing" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.endswith("or --check ROWS.jsonl\n")
    assert main(["plan", "--check"]) == 2
    assert "option '--check' requires an argument" in capsys.readouterr().err
    assert main(["plan", "--check", "none.jsonl"]) == 2
    assert capsys.readouterr().err == "stretto: none.jsonl can't be read: No such file or directory\n"


def test_plans_that_are_refused_for_one_reason_share_a_line() -> None:
    refused = [Choice(f"dp={many}", refused=f"plan dp={many}: no") for many in (2, 3, 4)]
    room = Room(1, 2, 3 << 30, risk=0.9)
    choices = (*refused, Choice("dp=5", 1.0, 1.0, room=room), Choice("dp=6", 1.0, 1.0, room=Room(1, 2, 2 << 30, 0.8)))
    assert _refusals(choices) == {"no": ["dp=2", "dp=3", "dp=4"]}
    said = nothing_fits(choices, 1 << 30)
    assert "none fits" in said and "The least, dp=6, takes 2.0 GiB, and a worker has 1.0 GiB" in said


def test_a_long_run_loses_time_to_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", write(tmp_path), "--on", "64xH100", "--batch", "64", "--days", "30"]
    often, seldom = (
        json.loads(plan(*options, "--mtbf-hours", hours, "--json", capsys=capsys)) for hours in ("500", "50000")
    )
    assert often["failures"] == pytest.approx(64 * 30 * 24 / 500) == 100 * seldom["failures"]
    assert often["goodput_restart"] < seldom["goodput_restart"] < seldom["goodput_recovery"] < 1
    assert often["checkpoint_seconds"] < seldom["checkpoint_seconds"]
    assert often["twice_restart"] < seldom["twice_restart"] < 2
    assert "failures:" in plan(*options, capsys=capsys)


def test_what_stretto_can_t_run_yet_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", write(tmp_path, sequence=65536), "--on", "64xA100", "--batch", "8"]
    text = plan(*options, capsys=capsys)
    assert "cp=" not in text and "--planned looks at it as well" in text
    more = plan(*options, "--planned", capsys=capsys)
    assert "cp=" in more and "take a plan without it" in more
