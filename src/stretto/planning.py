"""Plans are rehearsed where a run's workers would be forked: in a host's process, before there is any worker.

So a task that can't be loaded, that prints or that never ends is met as it is in training, and the memory that a rank
is said to need counts from where a run's summary counts it. Who asks needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.choose import Choice, Planner
from stretto.corrections import Corrections
from stretto.elastic.failure import Failure
from stretto.errors import UserError
from stretto.launch import Job, LocalLauncher, WorkerContext
from stretto.launch.job import result_of
from stretto.plan import Plan
from stretto.planner.tables import LinkTable
from stretto.preload import ANY_PLAN

NO_LINKS = LinkTable("nothing", background=False, curves={})


@dataclass(frozen=True)
class Wanted:
    """What is to be predicted.

    Args:
        task: its file.
        workers: so many; all their plans, where ``plans`` names none.
        links: between them; needless for one.
        limit: bytes that a worker may have.
        seconds: after so many of looking, the plans that are left aren't looked at.
    """

    task: str
    sets: dict[str, str]
    workers: int
    plans: tuple[str, ...] = ()
    links: LinkTable = NO_LINKS
    limit: float | None = None
    corrections: Corrections = field(default_factory=Corrections)
    seconds: float = math.inf


@dataclass(frozen=True)
class Predicted:
    """What came out.

    Args:
        plans: the one to take first.
        steps, batch: of the task's recipe.
        failure: how the job ended, where the task ended it.
        failed: why a rehearsal ended by itself, where one did.
    """

    plans: tuple[Choice, ...] = ()
    steps: int = 0
    batch: int = 0
    failure: Failure | None = None
    failed: str = ""


def predict(launcher: LocalLauncher, wanted: Wanted, tell: Callable[[Choice], None]) -> Predicted:
    """Predicts plans on this machine, in a process of its own. What the task prints goes to standard error.

    Args:
        tell: is told of each plan as it comes.

    Raises:
        UserError: the task can't be loaded, or no plan trains it.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    links, factors = wanted.links.to_json(), asdict(wanted.corrections)
    payload = {**vars(wanted), "plans": list(wanted.plans), "links": links, "corrections": factors}
    job = Job(entry="stretto.planning:work", prepare="stretto.planning:prepare", payload=payload, safe_points=False)
    result = launcher.run(job, lambda member, event: tell(Choice.from_json(event["plan"])))
    if result.failure is not None and result.failure.kind == "user":
        raise UserError(result.failure.text)
    if result.failure is not None:
        return Predicted(failure=result.failure)
    (found,) = result_of(result, "the plans were not looked at")
    return Predicted(**{**found, "plans": tuple(map(Choice.from_json, found["plans"]))})


def prepare(payload: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """On the host: loads the task and looks at its plans."""
    from stretto.rehearse import RehearsalError, Rehearsals

    links, corrections = LinkTable.from_json(payload["links"]), Corrections(**payload["corrections"])
    wanted = Wanted(**{**payload, "links": links, "corrections": corrections})
    plans = [Plan.parse(text) for text in wanted.plans]
    loaded = plans or ANY_PLAN
    rehearsals = Rehearsals.of(
        Path(wanted.task), wanted.sets, plans=loaded, apart=links.background, per_host=links.per_host
    )
    planner = Planner(rehearsals, links, wanted.limit, corrections)

    def tell(one: Choice) -> None:
        report({"kind": "planned", "plan": one.to_json()})

    found, failed = list[Choice](), ""
    try:
        for plan in plans:
            found.append(planner.predict(plan))
            tell(found[-1])
        if not plans:
            found = planner.choose(wanted.workers, tell, wanted.seconds)
    except RehearsalError as error:
        failed = str(error)
    recipe = rehearsals.task.recipe
    sizes = {"steps": recipe.steps, "batch": recipe.batch}
    return {"plans": [one.to_json() for one in found], **sizes, "failed": failed}


def work(payload: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The worker's entry: what the host has found."""
    found: dict[str, Any] = context.prepared
    return found
