"""A timeline's picture and trace: what they show is what the timeline says."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from stretto.schedule import Costs, Flow, Span, Timeline, build_schedule, chrome_trace, picture, simulate

SVG = "{http://www.w3.org/2000/svg}"


def line(name: str, degree: int, chunks: int, num_microbatches: int, seconds: float = 0.01) -> Timeline:
    flow = Flow.chain(degree, chunks)
    stages = degree * chunks
    costs = Costs((seconds,) * stages, (2 * seconds,) * stages, (0.5,) * stages)
    return simulate(build_schedule(name, flow, num_microbatches), costs)


def boxes(svg: str) -> dict[str, tuple[ElementTree.Element, str]]:
    """Each action's box, by what it tells when pointed at: the rectangle and the number in it."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and title.text and rect is not None
        text = group.find(f"{SVG}text")
        found[title.text.split(":")[0]] = (rect, (text.text or "") if text is not None else "")
    return found


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_a_box_for_each_action_where_and_when_it_runs(name: str, chunks: int) -> None:
    timeline = line(name, 3, chunks, 6)
    found = boxes(picture(timeline, name))
    assert set(found) == {str(span) for span in timeline.spans}
    assert len(found) == len(timeline.spans)
    first = found["F0.0"][0]
    last = max(timeline.spans, key=lambda span: span.start)
    left = float(first.get("x", ""))
    scale = (float(found[str(last)][0].get("x", "")) - left) / last.start
    lanes = {span.rank: found[str(span)][0].get("y") for span in timeline.spans}
    assert len(set(lanes.values())) == 3
    for span in timeline.spans:
        rect, number = found[str(span)]
        assert float(rect.get("x", "")) == pytest.approx(left + span.start * scale, abs=0.02)
        assert float(rect.get("width", "")) == pytest.approx((span.end - span.start) * scale, abs=0.02)
        assert rect.get("y") == lanes[span.rank]
        assert number == (f"{span.stage}.{span.microbatch}" if chunks > 1 else str(span.microbatch))
    colours = {span.what: found[str(span)][0].get("fill") for span in timeline.spans}
    assert len(set(colours.values())) == len(colours) == len({str(span)[0] for span in timeline.spans})


def test_the_picture_needs_nothing_else_and_says_what_it_shows() -> None:
    timeline = line("zero-bubble", 2, 1, 4)
    svg = picture(timeline, "two <ranks> & more")
    root = ElementTree.fromstring(svg)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"two <ranks> & more", "rank 0", "rank 1", "forward", "numbers: microbatch"} <= set(texts)
    assert {"gradient of the inputs", "gradient of the weights", "0", "20 ms"} <= set(texts)
    assert f"130 ms, bubble {timeline.bubble:.1%}, at most 2 microbatch(es) kept on a rank" in texts
    assert "backward" not in texts  # the legend names what is there
    assert "prefers-color-scheme: dark" in svg
    assert all(word not in svg for word in ("<script", "href", "url(", "@import"))


def test_the_picture_of_many_microbatches_has_bounds() -> None:
    root = ElementTree.fromstring(picture(line("1f1b", 2, 1, 300), "long"))
    assert float(root.get("width", "")) < 6200
    found = boxes(picture(line("1f1b", 2, 1, 300), "long"))
    assert found["F0.200"][1] == ""  # no room for three digits in the narrow ones,
    assert found["B0.5"][1] == "5"  # but for one digit in the wide ones


def test_a_picture_without_time_is_still_one() -> None:
    ElementTree.fromstring(picture(line("gpipe", 2, 1, 2, seconds=0.0), "nothing takes time"))


def test_a_trace_of_a_schedule() -> None:
    timeline = line("1f1b", 2, 1, 3)
    trace = json.loads(json.dumps(chrome_trace(timeline.spans, "mine")))
    named = {(e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}
    done = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len(done) == len(timeline.spans)
    for span in timeline.spans:
        event = done[str(span)]
        assert (event["tid"], event["args"]) == (span.rank, {"stage": span.stage, "microbatch": span.microbatch})
        assert event["cat"] == {"F": "forward", "B": "backward"}[span.what]
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)


def test_a_trace_of_what_was_measured() -> None:
    """Other words than the four kinds, on a clock that doesn't begin at 0, in any order."""
    spans = [Span(1, "send", 1000.5, 1000.75, 0, 2), Span(0, "reduce", 1000.25, 1001.0), Span(0, "odd", 1001.0, 1001.5)]
    events = [event for event in chrome_trace(spans)["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events] == [
        ("reduce", "reduce", 0, 0.0, 750000.0, {}),
        ("send 0.2", "send", 1, 250000.0, 250000.0, {"stage": 0, "microbatch": 2}),
        ("odd", "odd", 0, 750000.0, 500000.0, {}),
    ]
    assert [event for event in chrome_trace([])["traceEvents"] if event["ph"] == "X"] == []
    ElementTree.fromstring(picture(Timeline(tuple(spans), 1001.5, (1.25, 0.25), 0.5, (0, 0)), "measured"))
