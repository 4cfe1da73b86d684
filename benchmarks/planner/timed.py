"""Jobs' entries: of workers that step a run and tell how long each step took, and of a host that rehearses plans."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from stretto.choose import Planner
from stretto.errors import LaunchError
from stretto.launch import WorkerContext
from stretto.launch.process import fork
from stretto.observe import allocator, rss_bytes
from stretto.order import TrainOrder
from stretto.plan import Plan
from stretto.planner.tables import LinkTable
from stretto.preload import preloads_of
from stretto.prepared import RunOptions
from stretto.rehearse import Rehearsals
from stretto.training import form_group, open_run, prepare


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Returns seconds of each step, and the summary's peak of memory."""
    order = TrainOrder(**payload)
    group = form_group(context.prepared.plan, context)
    run = open_run(context.prepared, RunOptions(Path(order.run), order.attempt, order.stop_after), context, group)
    seconds = [run.step(batch).seconds for batch in run.batches()]
    return {"seconds": seconds, "peak_bytes": run.finish()["peak_bytes"]}


def apart(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The same on a host of several, where nobody has prepared anything. It is forked once all is imported, as a worker
    of ``stretto train`` is, so that its memory counts from the same point."""
    for name in preloads_of():
        importlib.import_module(name)
    own = Path(payload["run"], f"prepared-{context.rank}")
    own.mkdir()
    with tempfile.TemporaryFile() as results:

        def run() -> int:
            context.imports_rss_bytes = rss_bytes()
            context.prepared = prepare({**payload, "run": str(own)}, lambda event: None)
            results.write(json.dumps(work(payload, context)).encode())
            results.flush()
            return 0

        if code := fork(run).reap():
            raise LaunchError(f"rank {context.rank} ended with status {code}")
        results.seek(0)
        found: dict[str, Any] = json.load(results)
        return found


def rehearse(payload: dict[str, Any], report: Any) -> list[dict[str, Any]]:
    """On the host, as :func:`stretto.planning.prepare` does: what is predicted of each plan. Ranks that will be apart
    are rehearsed at once all the same, for the hosts are this machine's namespaces and share its cores."""
    rehearsals = Rehearsals.of(Path(payload["task"]), payload["sets"], apart=payload["apart"])
    planner = Planner(rehearsals, LinkTable.from_json(payload["links"]))
    return [planner.predict(Plan.parse(plan)).to_json() | {"allocator": allocator()} for plan in payload["plans"]]
