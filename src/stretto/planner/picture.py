"""A picture of a plan: its schedule, and above it what less memory costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from stretto.planner.play import Played
from stretto.schedule import picture

_STYLE: Final = """
.frontier text { font: 11px system-ui, sans-serif; fill: #202124 }
.frontier .back { fill: #fff } .frontier .line { stroke: #1a73e8; fill: none; stroke-width: 1.5 }
.frontier circle { fill: #1a73e8 } .frontier .axis { stroke: #9aa0a6 }
@media (prefers-color-scheme: dark) {
.frontier text { fill: #e8eaed } .frontier .back { fill: #202124 } }"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 260, 72, 44, 44


def draw(points: Sequence[tuple[float, float]], played: Played | None, title: str) -> str:
    """An SVG without scripts.

    Args:
        points: (bytes, seconds) of the fastest plans by the memory that they take.
        played: of the plan; None where it has no pipeline.
        title: says which plan it is.
    """
    top = _frontier(points, title)
    if played is None:
        return top
    below = picture(played.timeline, f"schedule of {title}, the microbatches that were played")
    wide, high = (float(side) for side in below.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())
    width = max(_WIDTH, wide)
    size = f'viewBox="0 0 {width:g} {_HEIGHT + high:g}" width="{width:g}" height="{_HEIGHT + high:g}"'
    below = below.replace("<svg ", f'<svg y="{_HEIGHT}" height="{high:g}" ', 1)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{top}{below}</svg>\n'


def _frontier(points: Sequence[tuple[float, float]], title: str) -> str:
    lowest, longest = min(point[0] for point in points), max(point[1] for point in points)
    most, shortest = max(point[0] for point in points), min(point[1] for point in points)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - lowest) / ((most - lowest) or 1)
        down = (longest - point[1]) / ((longest - shortest) or 1)
        return _LEFT + 8 + across * (_WIDTH - _LEFT - 32), _TOP + 8 + down * (_HEIGHT - _TOP - _BOTTOM - 16)

    told = [(*place(point), f"{point[1]:.4g} s with {point[0] / 1e9:.1f} GB") for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in told)
    low = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' role="img" class="frontier">',
        f'<title>{escape(title)}</title><style>{_STYLE}</style><rect class="back" width="100%" height="100%"/>',
        f'<text x="8" y="18" style="font-weight: bold">{escape(title)}</text>',
        '<text x="8" y="34">seconds of the fastest plan by memory of the device that needs the most</text>',
        f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{low}H{_WIDTH - 16}"/>',
        f'<polyline class="line" points="{line}"/>',
        *(f'<g><title>{text}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>' for x, y, text in told),
    ]
    for seconds in sorted({shortest, longest}):
        y = place((lowest, seconds))[1]
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_round(seconds)} s</text>')
    for size in sorted({lowest, most}):
        x = place((size, longest))[0]
        parts.append(f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">{size / 1e9:.0f} GB</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
