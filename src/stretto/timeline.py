"""What the ranks were about in the last steps, as a file for a trace viewer, and the pipeline's bubble.

``RUN/trace/steps-FIRST-LAST.json`` is Chrome's trace-event format (open it in ``ui.perfetto.dev``): one lane a rank.
Every rank's clock is that of its host, so lanes of several hosts may stand apart by what their clocks do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from stretto.comm.members import Members
from stretto.observe import Lanes, Noted
from stretto.runfolder import write_text
from stretto.schedule import Costs, Kind, Schedule, Span, chrome_trace, simulate

FOLDER: Final = "trace"
_KINDS: Final = MappingProxyType({"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "weights": Kind.WEIGHT})


def tell_time(run: Path, lanes: Lanes, group: Members, schedule: Schedule | None, title: str) -> dict[str, Any]:
    """Writes the trace; returns what the summary says of it. Every rank must call it."""
    found: dict[str, Any] = {}
    try:
        _write_trace(run, lanes, group, title)
    except OSError as error:  # a full disk must not cost the summary
        found["trace"] = f"not written: {error}"
    bubble = bubble_of(lanes, group, schedule)
    return found if bubble is None else {**found, "pipeline": bubble}


def _write_trace(run: Path, lanes: Lanes, group: Members, title: str) -> None:
    mine = [[step, [_plain(span) for span in spans]] for step, spans in lanes.steps]
    every = group.gather_json(mine)
    if group.rank or not lanes.steps:
        return
    spans = [
        Span(rank, _KINDS.get(what, what), start, end, stage, microbatch)
        for rank, steps in enumerate(every)
        for _, noted in steps
        for what, start, end, stage, microbatch in noted
    ]
    first, last = lanes.steps[0][0], lanes.steps[-1][0]
    (run / FOLDER).mkdir(exist_ok=True)
    text = json.dumps(chrome_trace(spans, f"{title}, steps {first} to {last}"))
    write_text(run / FOLDER / f"steps-{first:08d}-{last:08d}.json", text + "\n")


def _plain(span: Noted) -> list[Any]:
    return [span.what, span.start, span.end, span.stage, span.microbatch]


def bubble_of(lanes: Lanes, group: Members, schedule: Schedule | None) -> dict[str, Any] | None:
    """How much of its time a pipeline waited, in all steps but the first, and how much its schedule has it wait with
    stages that take as long as these did. None without a pipeline, or where no second step was made. Every rank must
    call it."""
    own = [[what, stage, lanes.seconds[what, stage], lanes.counts[what, stage]] for what, stage in lanes.seconds]
    every = group.gather_json({"running": lanes.running, "work": own})
    running = max(float(each["running"]) for each in every)
    if schedule is None or len(schedule.flow.ranks) == 1 or not running:
        return None
    totals: dict[tuple[str, int], tuple[float, int]] = {}
    for what, stage, seconds, count in (one for each in every for one in each["work"] if one[0] in _KINDS):
        before = totals.get((what, stage), (0.0, 0))
        totals[what, stage] = before[0] + seconds, before[1] + count
    busy = sum(seconds for seconds, _ in totals.values())
    return {
        "schedule": schedule.name,
        "bubble": 1 - busy / (running * group.size),
        "bubble_of_schedule": simulate(schedule, _costs(totals, len(schedule.flow.ranks))).bubble,
    }


def _costs(totals: Mapping[tuple[str, int], tuple[float, int]], count: int) -> Costs:
    def mean(what: str, stage: int) -> float:
        seconds, number = totals.get((what, stage), (0.0, 1))
        return seconds / number

    stages = range(count)
    weights = [mean("weights", stage) for stage in stages]
    backwards = [mean("backward", stage) + weight for stage, weight in zip(stages, weights, strict=True)]
    shares = tuple(weight / whole if whole else 0.0 for weight, whole in zip(weights, backwards, strict=True))
    return Costs(tuple(mean("forward", stage) for stage in stages), tuple(backwards), shares)
