"""Numbers and plans in words: what the display prints, as plain text. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PLAN_LINES = 12


def count(value: float) -> str:
    """``41200`` -> ``41,200``; under a hundred with one decimal."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def size(num_bytes: int) -> str:
    """``16986931`` -> ``16 MiB``."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def clock(seconds: float) -> str:
    """``92`` -> ``1:32``; ``3725`` -> ``1:02:05``."""
    whole = max(0, math.ceil(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def duration(seconds: float) -> str:
    """``6.12`` -> ``6.1 s``; from two minutes on as a clock."""
    return f"{seconds:.1f} s" if seconds < 120 else clock(seconds)


def number(value: float | None) -> str:
    """Four decimals, fewer where the number is large, an exponent where it is tiny."""
    if value is None or not math.isfinite(value):
        return "nan" if value is None else str(value)
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def measures(values: dict[str, float | None]) -> str:
    """``loss 1.2034  accuracy 0.9111``."""
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def setting(key: str, value: Any) -> str:
    """``key=value`` as one would give it."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes')}={size(value).replace(' ', '')}"
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


@dataclass(frozen=True)
class PlanLine:
    """One line of the resolved plan: values of one section that have one origin.

    Args:
        section: empty where it is that of the line above.
        origin: empty where the values go on in the next line.
    """

    section: str
    text: str
    origin: str


def plan_lines(rows: Iterable[Sequence[Any]], run: str, width: int) -> list[PlanLine]:
    """The resolved plan in at most 12 lines, grouped by section and origin.

    Args:
        rows: section, key, value, origin.
        width: columns that section, text and origin may take together.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for section, key, value, origin in rows:
        text = _from_here(str(value)) if section == "task" else setting(key, value)
        groups.setdefault((section, origin), []).append(text)
    places = {section: place for place, (section, _) in reversed(list(enumerate(groups)))}
    order = sorted(groups, key=lambda group: (places[group[0]], not group[1].startswith("-"), "default" in group[1]))
    lines: list[PlanLine] = []
    room = MAX_PLAN_LINES - len(groups) - 1
    last = ""
    for section, origin in order:
        pieces = groups[section, origin]
        # What was chosen is shown whole first; what nobody touched makes way where lines are short.
        folded = fold(pieces, max(20, width - 12 - len(origin) - 4), 1 + max(0, room))
        room -= len(folded) - 1
        for place, text in enumerate(folded):
            shown = section if section != last and place == 0 else ""
            lines.append(PlanLine(shown, text, "" if section == "task" or place < len(folded) - 1 else origin))
        last = section
    return [*lines, PlanLine("run", _from_here(run), "")]


def fold(pieces: Sequence[str], width: int, most: int) -> list[str]:
    """The pieces on lines of ``width``, at most so many lines; the last line counts what there is no room for."""
    lines = [""]
    for place, piece in enumerate(pieces):
        longer = f"{lines[-1]} {piece}".strip()
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(piece)
        else:
            lines[-1] += f" … {len(pieces) - place} more"
            break
    return lines


def held_out(metrics: dict[str, float | None], baselines: dict[str, float], step: int) -> list[str]:
    """A small table: the metrics of this run, and beside them the baselines."""
    left = [("held out", f"step {step:,}"), *((name, number(value)) for name, value in metrics.items())]
    right = [("beside it", "")] if baselines else []
    right += [(name, number(value)) for name, value in baselines.items()]
    names, values, others = (
        max((len(row[place]) for row in side), default=0) for side, place in ((left, 0), (left, 1), (right, 0))
    )
    lines = []
    for place in range(max(len(left), len(right))):
        name, value = left[place] if place < len(left) else ("", "")
        line = f"{name:<{names}}  {value:>{values}}"
        if place < len(right):
            line += f"    {right[place][0]:<{others}}  {right[place][1]:>{8 if right[place][1] else 0}}"
        lines.append(line.rstrip())
    return lines


def _from_here(path: str) -> str:
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else path
