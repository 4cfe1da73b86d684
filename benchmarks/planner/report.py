"""Writes how well the planner predicts into ``docs/planner.md``, with a picture of predicted against published.

    python benchmarks/planner/report.py ROWS.jsonl

The search times are those that ``search.py`` has left in ``results.json``, and the plans of this machine those that
``here.py`` has left in ``here.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stretto.planner.accuracy import Accuracy, judge, predict
from stretto.planner.constants import MEANINGS
from stretto.planner.published import Published, read_rows

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#393b79", "#637939"),
)
SIZE, MARGIN = 640, 56
COLUMNS = (
    ("rows", "rows"),
    ("skipped", "skipped"),
    ("time_mape", "time, mean %"),
    ("time_median_ape", "median %"),
    ("constant_mfu_mape", "by its median MFU %"),
    ("memory_mape", "memory, mean %"),
    ("memory_median_ape", "median %"),
    ("rank_correlation", "rank"),
    ("regret_cells", "choices within 5 %"),
    ("fit_contradictions", "misfits %"),
)


def table(found: Sequence[Accuracy]) -> str:
    """Markdown."""
    lines = ["| source | " + " | ".join(title for _, title in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for one in found:
        values = one.to_json()
        if one.rows:
            lines.append(f"| {one.source} | " + " | ".join(_cell(values[key]) for key, _ in COLUMNS) + " |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def picture(rows: Sequence[Published], seconds: np.ndarray) -> str:
    """Predicted against published, an SVG: logarithmic axes, one colour a source."""
    sources = list(dict.fromkeys(row.source for row in rows))
    colour = dict(zip(sources, COLOURS * 3, strict=False))
    every = [*(float(row.seconds or 1) for row in rows), *map(float, seconds)]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))

    def place(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * (SIZE - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + 210} {SIZE}" font-family="sans-serif" '
        f'font-size="12"><rect width="{SIZE + 210}" height="{SIZE}" fill="white"/>'
    ]
    for power in range(low, high + 1):
        at = place(10.0**power)
        parts.append(
            f'<path d="M{at:.1f} {MARGIN}V{SIZE - MARGIN}M{MARGIN} {SIZE - at:.1f}H{SIZE - MARGIN}" stroke="#ddd"/>'
            f'<text x="{at:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{10.0**power:g} s</text>'
            f'<text x="{MARGIN - 8}" y="{SIZE - at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    parts.append(f'<path d="M{MARGIN} {SIZE - MARGIN}L{SIZE - MARGIN} {MARGIN}" stroke="black"/>')
    for row, said in zip(rows, seconds, strict=True):
        x, y = place(float(row.seconds or 1)), SIZE - place(float(said))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour[row.source]}" fill-opacity="0.5"/>')
    for at, source in enumerate(sources):
        y = MARGIN + 18 * at
        parts.append(f'<circle cx="{SIZE - 20}" cy="{y - 4}" r="5" fill="{colour[source]}"/>')
        parts.append(f'<text x="{SIZE - 8}" y="{y}">{source}</text>')
    parts.append(f'<text x="{SIZE / 2}" y="{SIZE - 12}" text-anchor="middle">a step, published</text>')
    parts.append(f'<text transform="translate(14 {SIZE / 2})rotate(-90)" text-anchor="middle">predicted</text></svg>')
    return "\n".join(parts) + "\n"


def search_times() -> str:
    """Markdown, of what ``search.py`` has measured."""
    found = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    lines = ["| model | devices | plans | seconds | bar |", "|---|---|---|---|---|"]
    for name, one in found.items():
        if isinstance(one, dict) and "candidates" in one:
            figures = f"{one['candidates']:,} | {one['seconds']:.2f} | {one['most_seconds']:g}"
            lines.append(f"| {name} | {one['devices']} | {figures} |")
    return "\n".join(lines)


def here() -> str:
    """Markdown, of what ``here.py`` has measured; nothing where it hasn't."""
    file = HERE / "here.json"
    if not file.is_file():
        return ""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    lines = ["| task | plan | ms predicted | measured | | MB predicted | measured | |", "|---" * 8 + "|"]
    for row in rows:
        times = f"{1e3 * row['predicted']:.1f} | {1e3 * row['measured']:.1f} | {row['time_error']:+.1%}"
        sizes = f"{row['predicted_bytes'] / 1e6:.0f} | {row['measured_bytes'] / 1e6:.0f} | {row['memory_error']:+.1%}"
        lines.append(f"| {row['task']} | {row['plan']} | {times} | {sizes} |")
    time, memory = (np.mean([abs(row[key]) for row in rows]) for key in ("time_error", "memory_error"))
    head = f"Mean error of the step's time {time:.1%}, of the peak memory {memory:.1%}."
    return "\n\n".join(["## This machine: rehearsed before, trained after", head, "\n".join(lines)])


def main() -> None:
    """Writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    options = parser.parse_args()
    read = list(read_rows(options.rows))
    timed = [row for _, row in read if isinstance(row, Published) and row.seconds]
    constants = "\n".join(f"- `{name}`: {meaning}" for name, meaning in MEANINGS.items())
    parts = [
        "# How far to trust the planner",
        "Written by `benchmarks/planner/report.py`; nothing here is typed by hand.",
        "## Published steps\n\nPredicted by formula; the constants of each training system on each device are fitted "
        "to these rows (`benchmarks/planner/fit.py` prints the errors on what was left out). *By its median MFU*: the "
        "error of predicting every row of a source by the source's own median share of the peak rate.",
        table(judge(read)),
        "![Predicted against published](planner.svg)",
        f"The constants:\n\n{constants}",
        f"## The search\n\nThe whole command, on one core.\n\n{search_times()}",
    ]
    if machine := here():
        parts.append(machine)
    (DOCS / "planner.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (DOCS / "planner.svg").write_text(picture(timed, predict(timed)), encoding="utf-8")


if __name__ == "__main__":
    main()
