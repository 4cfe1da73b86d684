"""Timelines to look at: a self-contained SVG, and Chrome's trace format for measured ones as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from types import MappingProxyType
from typing import Any, Final

from stretto.schedule.simulate import Span, Timeline

# Light fills with dark text: they stand out from a white page and from a black one.
WORDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "F": ("forward", "#8ab4f8"),
        "B": ("backward", "#81c995"),
        "I": ("gradient of the inputs", "#78d9ec"),
        "W": ("gradient of the weights", "#fdd663"),
        "send": ("send", "#d7aefb"),
        "receive": ("receive", "#f8bbd9"),
        "reduce": ("reduce", "#fcad70"),
        "idle": ("idle", "#bdc1c6"),
    }
)
OTHER: Final = "#bdc1c6"
# Under a class of its own, since the picture may stand inside of a page.
STYLE: Final = """
.pipeline text { font: 11px system-ui, sans-serif; fill: #202124 }
.pipeline .lane { fill: #f1f3f4 } .pipeline .tick { stroke: #dadce0 } .pipeline .back { fill: #fff }
.pipeline .edge { stroke: #202124; stroke-width: .5 }
@media (prefers-color-scheme: dark) {
.pipeline text.out { fill: #e8eaed }
.pipeline .lane { fill: #303134 } .pipeline .tick { stroke: #5f6368 } .pipeline .back { fill: #202124 }
}"""
LEFT, TOP, LANE, GAP = 64, 48, 26, 6  # pixels: the ranks' names, the two lines above, a lane, between lanes
LEAST_WIDTH, MOST_WIDTH, LEAST_BOX, DIGIT = 640.0, 6000.0, 20.0, 6.5


def picture(timeline: Timeline, title: str) -> str:
    """An SVG without scripts: a lane a rank, a box an action, coloured by kind, with the number of its microbatch.

    Where some rank holds several stages, a box says ``stage.microbatch``. Pointing at a box tells the rest.
    """
    ranks = len(timeline.busy)
    width = _width(timeline)
    scale = width / timeline.seconds if timeline.seconds else 0.0
    bottom = TOP + ranks * (LANE + GAP)
    several = len({(span.rank, span.stage) for span in timeline.spans if span.stage is not None}) > ranks
    size = f"{LEFT + width + 24:.0f} {bottom + 60}"
    kept = f"at most {max(timeline.in_flight)} microbatch(es) kept on a rank"
    told = f"{_time(timeline.seconds)}, bubble {timeline.bubble:.1%}, {kept}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{size.split()[0]}" role="img"'
        ' class="pipeline">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        '<rect class="back" width="100%" height="100%"/>',
        f'<text class="out" x="{LEFT}" y="18" style="font-weight: bold">{escape(title)}</text>',
        f'<text class="out" x="{LEFT}" y="36">{escape(told)}</text>',
    ]
    for rank in range(ranks):
        y = TOP + rank * (LANE + GAP)
        parts.append(f'<text class="out" x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{width:.2f}" height="{LANE}"/>')
    parts += _axis(timeline.seconds, scale, bottom)
    parts += [_box(span, scale, several) for span in timeline.spans]
    parts += _legend(timeline, bottom + 46, "stage.microbatch" if several else "microbatch")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _width(timeline: Timeline) -> float:
    """So many pixels that the shortest action has room for its number, within bounds."""
    lengths = [span.end - span.start for span in timeline.spans if span.end > span.start]
    wanted = LEAST_BOX * timeline.seconds / min(lengths) if lengths else 0.0
    return min(max(wanted, LEAST_WIDTH), MOST_WIDTH)


def _box(span: Span, scale: float, several: bool) -> str:
    x, y = LEFT + span.start * scale, TOP + span.rank * (LANE + GAP)
    wide = (span.end - span.start) * scale
    word, colour = WORDS.get(span.what, (span.what, OTHER))
    told = f"{span}: {word}, {_time(span.start)} to {_time(span.end)}"
    number = "" if span.microbatch is None else f"{span.stage}.{span.microbatch}" if several else f"{span.microbatch}"
    text = f'<text x="{x + wide / 2:.2f}" y="{y + 17}" text-anchor="middle">{number}</text>'
    rect = f'<rect class="edge" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{LANE}" fill="{colour}"/>'
    return f"<g><title>{escape(told)}</title>{rect}{text if number and len(number) * DIGIT <= wide else ''}</g>"


def _axis(seconds: float, scale: float, bottom: float) -> Iterator[str]:
    if seconds <= 0:
        return
    step = 10 ** math.floor(math.log10(seconds))  # then 1, 2 or 5 of it, so that there are 5 to 10 or so
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if seconds / (step * part) <= 12)
    for number in range(int(seconds / step * (1 + 1e-9)) + 1):
        x = LEFT + number * step * scale
        yield f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP}" y2="{bottom + 4}"/>'
        yield f'<text class="out" x="{x:.2f}" y="{bottom + 17}" text-anchor="middle">{_time(number * step)}</text>'


def _legend(timeline: Timeline, y: float, number: str) -> Iterator[str]:
    x = float(LEFT)
    seen = {span.what for span in timeline.spans}
    for kind in [*(kind for kind in WORDS if kind in seen), *sorted(seen - WORDS.keys())]:
        word, colour = WORDS.get(kind, (kind, OTHER))
        yield f'<rect class="edge" x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text class="out" x="{x + 16:.0f}" y="{y}">{escape(word)}</text>'
        x += 36 + DIGIT * len(word)
    yield f'<text class="out" x="{x:.0f}" y="{y}">numbers: {number}</text>'


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit * 0.9995:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"


def chrome_trace(spans: Iterable[Span], title: str = "pipeline") -> dict[str, Any]:
    """Chrome's trace-event JSON (for chrome://tracing or ui.perfetto.dev): one lane a rank, time 0 at the first span.

    ``spans`` may be planned or measured, in any order; measured ones of several ranks must be on one clock.
    """
    known = sorted(spans, key=lambda span: (span.start, span.rank))
    begin = known[0].start if known else 0.0
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    for rank in sorted({span.rank for span in known}):
        lane = {"ph": "M", "pid": 0, "tid": rank}
        events.append({"name": "thread_name", **lane, "args": {"name": f"rank {rank}"}})
        events.append({"name": "thread_sort_index", **lane, "args": {"sort_index": rank}})
    for span in known:
        args = {"stage": span.stage, "microbatch": span.microbatch}
        events.append(
            {
                "name": str(span),
                "cat": WORDS.get(span.what, (str(span.what), ""))[0],
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": (span.start - begin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {name: value for name, value in args.items() if value is not None},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
