"""Fits the planner's constants to published measurements, and judges each set on models that it wasn't fitted to.

    python benchmarks/planner/fit.py ROWS.jsonl [--write]

By least squares of the logarithm of predicted over published, with less weight to what is far off; each constant is
drawn to a plausible value as if by one row that is a tenth off, so that what no row tells stays plausible.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

import stretto.planner
from stretto.planner.accuracy import predict
from stretto.planner.constants import Constants, likely
from stretto.planner.hardware import find_device
from stretto.planner.published import Published, read_rows, steps_of

NAMES = [field.name for field in fields(Constants)]
START = Constants(stall_seconds=1e-4)
WIDTH = {"stall_seconds": 2.5, "launch_seconds": 1.0, "latency_seconds": 1.0, "attention": 0.5, "between": 0.7}
DRAW = 0.1
FAR = 0.1  # an error from which on rows count less
SHARES = ("matmul", "attention", "memory", "inside", "between")  # of what a device can at most
WHERE = Path(stretto.planner.__file__).parent / "data" / "constants.yaml"


def fit(rows: Sequence[Published]) -> Constants:
    """The constants that fit the rows best; each model weighs alike, however many rows there are of it."""
    measured = np.array([row.seconds for row in rows])
    each = Counter(row.name for row in rows)
    weights = np.sqrt([len(rows) / len(each) / each[row.name] for row in rows])
    start = np.log([getattr(START, name) for name in NAMES])
    widths = np.array([WIDTH.get(name, 0.3) for name in NAMES])
    most = np.array([0.0 if name in SHARES else np.inf for name in NAMES])

    def constants(x: np.ndarray) -> Constants:
        return Constants(**dict(zip(NAMES, map(float, np.exp(x)), strict=True)))

    def off(x: np.ndarray) -> np.ndarray:
        found = constants(x)
        errors = np.log(predict(rows, lambda *_: found) / measured)
        less = np.sign(errors) * FAR * np.sqrt(2 * (np.sqrt(1 + (errors / FAR) ** 2) - 1))
        return np.concatenate([weights * less, (x - start) / widths * DRAW])

    return constants(least_squares(off, start, bounds=(-np.inf, most)).x)


def error(rows: Sequence[Published], constants: Constants) -> np.ndarray:
    """Percent, of each row."""
    measured = np.array([row.seconds for row in rows])
    return 100 * np.abs(predict(rows, lambda *_: constants) / measured - 1)


def halves(rows: Sequence[Published], source: str) -> None:
    """Prints the error on each half of the rows, fitted on the other."""
    for name, low in (("depth", lambda row: row.model.layers < 18), ("width", lambda row: row.model.hidden < 2048)):
        one, other = [row for row in rows if low(row)], [row for row in rows if not low(row)]
        if one and other:
            found = [error(test, fit(train)).mean() for train, test in ((one, other), (other, one))]
            print(f"{source}, halves by {name}: {found[0]:.1f} % and {found[1]:.1f} %", flush=True)


def drawn(rows: Sequence[Published], source: str) -> None:
    """Prints the error on each half of the rows of a source that has one model, drawn three times."""
    found = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        for half in (order[::2], order[1::2]):
            rest = [row for at, row in enumerate(rows) if at not in half]
            found.append(error([rows[at] for at in half], fit(rest)).mean())
    told = ", ".join(f"{one:.1f}" for one in found)
    print(f"{source}, halves drawn: {told}; mean {np.mean(found):.1f} %", flush=True)


def leave_out(rows: Sequence[Published], source: str) -> None:
    """Prints the error on each of a source's models, fitted on all others of the set."""
    found = []
    for name in sorted({row.name for row in rows if row.source == source}):
        rest = [row for row in rows if row.name != name]
        test = [row for row in rows if row.name == name and row.source == source]
        if len(rest) >= 3:
            errors = error(test, fit(rest))
            found.append((name, len(test), errors.mean(), np.median(errors)))
    if found:
        told = ", ".join(f"{name} ({count}) {mean:.1f}/{median:.1f}" for name, count, mean, median in found)
        every = sum(count * mean for _, count, mean, _ in found) / sum(count for _, count, *_ in found)
        print(f"{source}, each model left out (mean/median %): all {every:.1f}; {told}", flush=True)


def without(sets: Mapping[tuple[str, str], Sequence[Published]], fitted: Mapping[str, Constants]) -> None:
    """Prints the error on each set with what is expected of its device when none of it, and none of its family, has
    been seen: new software on a known device, a new device, a new family."""
    for (device, software), rows in sets.items():
        family = find_device(device).family
        left = (
            ("set", lambda name, own=f"{device}/{software}": name != own),
            ("device", lambda name, device=device: name.partition("/")[0] != device),
            ("family", lambda name, family=family: find_device(name.partition("/")[0]).family != family),
        )
        found = [(what, {name: one for name, one in fitted.items() if keep(name)}) for what, keep in left]
        told = ", ".join(f"{what} {error(rows, likely(device, software, rest)).mean():.1f}" for what, rest in found)
        print(f"{device}/{software}, left out (mean %): {told}", flush=True)


def main() -> None:
    """Fits, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--write", action="store_true", help=f"into {WHERE.name}, which the planner reads")
    options = parser.parse_args()
    sets: dict[tuple[str, str], list[Published]] = defaultdict(list)
    for row in steps_of(read_rows(options.rows)):
        sets[row.device.name, row.software].append(row)
    written, fitted = {}, {}
    for (device, software), rows in sets.items():
        found = fit(rows)
        errors = error(rows, found)
        fitted[f"{device}/{software}"] = found
        written[f"{device}/{software}"] = {key: float(f"{value:.4g}") for key, value in found.to_json().items()}
        sources = ", ".join(sorted({row.source for row in rows}))
        print(f"{device}/{software} ({len(rows)} rows: {sources}): {errors.mean():.1f} %")
        print(f"  {written[f'{device}/{software}']}")
        for source in sorted({row.source for row in rows}):
            own = [row for row in rows if row.source == source]
            if source == "vtrain_single":
                halves(own, source)
            elif len({row.name for row in rows}) == 1:
                drawn(own, source)
            else:
                leave_out(rows, source)
    without(sets, fitted)
    if options.write:
        head = "# Written by benchmarks/planner/fit.py; planner/constants.py says what each is.\n"
        WHERE.write_text(head + yaml.safe_dump(written, sort_keys=True, width=118), encoding="utf-8")


if __name__ == "__main__":
    main()
