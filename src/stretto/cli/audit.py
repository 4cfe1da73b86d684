"""``stretto audit``: which samples each epoch of a run saw, missed or repeated."""

from __future__ import annotations

import typer

from stretto.cli.options import JsonOption, RunArgument


def audit_command(run: RunArgument, json: JsonOption = False) -> None:
    """Say which samples each epoch of a run saw, missed or repeated."""
    from json import dumps

    from stretto.elastic.ledger import audit

    found = audit(run)
    if json:
        print(dumps(found.to_json()))
    else:
        print(f"{'epoch':>5}  {'expected':>10}  {'seen':>10}  {'missing':>8}  {'repeated':>8}")
        for epoch in found.epochs:
            counts = f"{epoch.expected:>10,}  {epoch.seen:>10,}  {epoch.missing:>8,}  {epoch.repeated:>8,}"
            print(f"{epoch.epoch:>5}  {counts}")
        for fault in found.faults:
            print(fault)
        verdict = "every sample came exactly once" if found.ok else "some samples did not come exactly once"
        print(f"{found.steps:,} committed steps; {verdict}")
    raise typer.Exit(0 if found.ok else 1)
