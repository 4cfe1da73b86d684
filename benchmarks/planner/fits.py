"""Whether the planner refuses what would not fit: seeded limits around the measured peaks that ``here.py`` has left.

    python benchmarks/planner/fits.py [HERE.json ...]

Twenty cases whose measured peak is over the limit and twenty under it, half of each within 10 % of it. A plan is
refused where it is likelier than not that it doesn't fit. One draw of forty may be lucky, so others are told of too.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.choose import RISK
from stretto.planner.risk import probability_over

CASES, NEAR, FAR = 20, 0.1, 0.6
SEED, OTHERS = 5, range(40)
MOST_WRONG, SURE = 2, (0.2, 0.8)

Row = Mapping[str, Any]


def wrong_of(rows: Sequence[Row], seed: int) -> Iterator[tuple[Row, float, float]]:
    """Of a draw the cases that are judged wrongly: the row, the limit, and the probability that was stated."""
    drawn = random.Random(seed)
    for case in range(2 * CASES):
        row, over = drawn.choice(rows), case < CASES
        share = drawn.uniform(0.0, NEAR) if case % 2 else drawn.uniform(NEAR, FAR)
        limit = row["measured_bytes"] * (1 - share if over else 1 + share)
        risk = probability_over(row["predicted_bytes"], limit, row["spread"])
        if (risk >= RISK) != over:
            yield row, limit, risk


def main() -> None:
    """Prints each case of the first draw that is judged wrongly, how many, and how other draws go."""
    files = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parent / "here.json"]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    found = list(wrong_of(rows, SEED))
    for row, limit, risk in found:
        sizes = f"{row['measured_bytes'] / 1e6:.0f} MB measured, {row['predicted_bytes'] / 1e6:.0f} predicted"
        print(f"{row['task']} {row['plan']}: {sizes}, limit {limit / 1e6:.0f}: said {risk:.2f}")
    unsure = sum(SURE[0] <= risk <= SURE[1] for _, _, risk in found)
    print(f"{len(found)} of {2 * CASES} judged wrongly, {unsure} of them with a probability between 0.2 and 0.8")
    draws = [[risk for _, _, risk in wrong_of(rows, seed)] for seed in OTHERS]
    met = sum(len(one) <= MOST_WRONG and all(SURE[0] <= risk <= SURE[1] for risk in one) for one in draws)
    mean = statistics.mean(map(len, draws))
    print(f"{len(draws)} draws: {mean:.1f} wrong in the mean; at most {MOST_WRONG}, and those unsure, in {met}")


if __name__ == "__main__":
    main()
