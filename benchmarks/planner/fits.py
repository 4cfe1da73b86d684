"""Whether the planner refuses what would not fit: seeded limits around the measured peaks that ``here.py`` has left.

    python benchmarks/planner/fits.py [HERE.json]

Twenty cases whose measured peak is over the limit and twenty under it, half of each within 10 % of it. A plan is
refused where it is likelier than not that it doesn't fit.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from stretto.choose import RISK
from stretto.plan import Plan
from stretto.planner.risk import probability_over, rehearsed

CASES, NEAR, FAR = 20, 0.1, 0.6


def main() -> None:
    """Prints each case that is judged wrongly, and how many."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "here.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    drawn, wrong, unsure = random.Random(5), 0, 0
    for case in range(2 * CASES):
        row, over = drawn.choice(rows), case < CASES
        share = drawn.uniform(0.0, NEAR) if case % 2 else drawn.uniform(NEAR, FAR)
        limit = row["measured_bytes"] * (1 - share if over else 1 + share)
        spread = rehearsed(Plan.parse(row["plan"]).traced, row["allocator"]).spread
        risk = probability_over(row["predicted_bytes"], limit, spread)
        if (risk >= RISK) != over:
            wrong, unsure = wrong + 1, unsure + (0.2 <= risk <= 0.8)
            sizes = f"{row['measured_bytes'] / 1e6:.0f} MB measured, {row['predicted_bytes'] / 1e6:.0f} predicted"
            print(f"{row['task']} {row['plan']}: {sizes}, limit {limit / 1e6:.0f}: said {risk:.2f}")
    print(f"{wrong} of {2 * CASES} judged wrongly, {unsure} of them with a probability between 0.2 and 0.8")


if __name__ == "__main__":
    main()
