"""Proves plans: one device's steps as files, then each plan's workers against them. Loads no torch itself."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stretto.errors import Refused, UserError, one_line
from stretto.launch import Job, JobResult, LocalLauncher
from stretto.plan import Plan
from stretto.preload import BY_TRACE
from stretto.task import resolve_task_path
from stretto.verify.diagnose import first_divergence
from stretto.verify.facts import RankFacts, ReferenceRecord, Sighting
from stretto.verify.place import bound_for, down_to, located
from stretto.verify.report import Divergence, PlanReport, VerifyReport
from stretto.verify.tolerances import NAMES

PRELOADS: Final = ("torch", "torch.distributed", "torch._dynamo", "stretto.verify.worker", "stretto.parallel.whole")
PRELOADS_SHARDED: Final = ("torch.distributed.fsdp", "torch.distributed.tensor")
INTERRUPTED: Final = (130, 143)  # exit codes after Ctrl-C and SIGTERM


def verify(
    task: str | Path,
    plans: Sequence[str],
    sets: Mapping[str, Any] | None = None,
    steps: int = 5,
    *,
    launcher: LocalLauncher | None = None,
    plant: str | None = None,
    on_plan: Callable[[PlanReport], None] | None = None,
) -> VerifyReport:
    """Trains ``task`` for a few steps on one device and under each plan, and compares all numbers.

    Args:
        task: the task's file or folder.
        plans: such as ``dp=2,zero=3``.
        sets: settings and recipe fields; ``precision`` is ``fp64`` unless it is given.
        steps: steps to take, at most the recipe's.
        launcher: starts the workers; without one, one is made for this call. Its ``preload`` is best
            :func:`preloads`.
        plant: ``module:function``, a fault to plant in each of the plans' workers; several with commas between them.
        on_plan: called with each plan's report, in order, as soon as it is known.

    Raises:
        UserError: the task does not run on one device, for a reason that is the user's to mend.
        SystemExit: it was interrupted.
    """
    path = resolve_task_path(task)
    given = {"precision": "fp64", **(sets or {})}
    dtype = NAMES.get(str(given["precision"]), "float64")
    parsed = [_parse(text) for text in plans]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-verify-")))
        if launcher is None:
            launcher = stack.enter_context(LocalLauncher(preloads(plans)))
        payload = {"task": str(path), "sets": given, "steps": steps, "plant": plant}
        prover = _Prover(launcher, folder, payload)
        found: list[PlanReport] = []
        for text, plan in zip(plans, parsed, strict=True):
            found.append(
                prover.prove(text, plan)
                if isinstance(plan, Plan)
                else PlanReport(plan=text, status="refused", reason=plan)
            )
            if on_plan is not None:
                on_plan(found[-1])
    return VerifyReport(dtype, tuple(found))


def preloads(plans: Sequence[str]) -> tuple[str, ...]:
    """What a launcher's fork server should import beforehand for these plans."""
    known = [plan for plan in map(_parse, plans) if isinstance(plan, Plan)]
    sharded, traced = any(plan.zero == 3 for plan in known), any(plan.traced for plan in known)
    return (*PRELOADS, *(PRELOADS_SHARDED if sharded else ()), *(BY_TRACE if traced else ()))


def _parse(text: str) -> Plan | str:
    """The plan, or why it is refused. Raises PlanError for one that means nothing, such as a misspelt one."""
    try:
        return Plan.parse(text)
    except Refused as error:
        return str(error)


@dataclass(frozen=True)
class _Reference:
    """One device's steps: the files and the record, or why there are none."""

    folder: Path
    record: ReferenceRecord | None
    failure: str = ""


class _Prover:
    """Runs the jobs of one verification, in ``folder``."""

    def __init__(self, launcher: LocalLauncher, folder: Path, payload: dict[str, Any]) -> None:
        self._launcher, self._folder, self._payload = launcher, folder, payload
        self._references: dict[int, _Reference] = {}

    def prove(self, text: str, plan: Plan) -> PlanReport:
        """One plan against one device cut as the plan cuts."""
        pieces = plan.dp * plan.microbatches
        if pieces not in self._references:
            self._references[pieces] = self._run_reference(pieces)
        reference = self._references[pieces]
        record = reference.record
        if record is None:
            return PlanReport(plan=text, status="failed", reason=f"one device alone fails: {reference.failure}")
        record = replace(record, cut_inside=plan.tp > 1)
        if record.batch_norms and record.random and pieces > 1:
            reason = (
                f"{record.batch_norms[0]} is a BatchNorm, whose statistics need the whole batch at once, and forward "
                "draws random numbers, which are drawn piece by piece: one device can't do both, so there is nothing "
                "to compare with. Verify with the random part off (such as dropout=0)"
            )
            return PlanReport(plan=text, status="refused", reason=reason)
        job = Job(
            entry="stretto.verify.worker:work",
            prepare="stretto.verify.worker:prepare",
            payload={**self._payload, "plan": str(plan), "folder": str(reference.folder)},
            num_workers=plan.world_size,
            log_dir=self._folder / "logs",
        )
        result = self._run(job, quiet=True)
        report = judge(text, record, result, plan)
        cut = next((found["assignment"] for found in result.results.values() if found and "assignment" in found), None)
        report = self._located(report, plan, replace(job, payload={**job.payload, "assignment": cut}), record)
        if report.status == "passed" and record.random and pieces > 1:
            reason = "forward draws random numbers, which belong to a batch's pieces: equal to one device with as many"
            report = replace(report, reason=f"{reason} (dp=1,microbatches={pieces})")
        if report.status == "passed" and plan.loaders:
            told = f"loaders={plan.loaders} took no part: verify watches each worker fetch its samples itself"
            report = replace(report, reason="\n".join(filter(None, (report.reason, told))))
        if report.status == "passed":
            notes = next(found["notes"] for found in result.results.values() if found is not None)
            report = replace(report, reason="\n".join(filter(None, (report.reason, *notes))) or None)
        return report

    def _located(self, report: PlanReport, plan: Plan, job: Job, record: ReferenceRecord) -> PlanReport:
        """Says where in forward a plan that cuts the model parts from one device: by that step once more, looked at."""
        found = report.first_divergence
        if found is None or found.what != "loss" or not plan.traced:
            return report
        if record.batch_norms and plan.dp > 1:
            return report  # what a rank runs beside has its own samples, and a BatchNorm takes those of all
        look = [found.step, bound_for(found, record)]
        again = self._run(replace(job, payload={**job.payload, "look": look}), quiet=True)
        seen: dict[int, Sighting | None] = {}
        for returned in again.results.values():
            if returned is not None and "seen" in returned:
                seen[returned["facts"]["rank"]] = None if returned["seen"] is None else Sighting(**returned["seen"])
        named = located(found, seen, plan)
        return replace(report, reason=str(named), first_divergence=named)

    def _run_reference(self, pieces: int) -> _Reference:
        folder = self._folder / f"one-device-{pieces}"
        folder.mkdir()
        payload = {**self._payload, "pieces": pieces, "folder": str(folder)}
        job = Job("stretto.verify.reference:run", payload, log_dir=self._folder / "logs")
        result = self._run(job, quiet=bool(self._references))
        if result.failure is not None and result.failure.kind == "user":
            raise UserError(result.failure.text)
        for found in result.results.values():
            if result.failure is None and found is not None:
                return _Reference(folder, ReferenceRecord.from_json(found))
        return _Reference(folder, None, result.failure.text if result.failure else f"exit code {result.exit_code}")

    def _run(self, job: Job, quiet: bool) -> JobResult:
        """Runs a job; what a task prints is shown once, and never among what this command prints."""
        result = self._launcher.run(job, on_output=_discard if quiet else _to_stderr)
        if result.exit_code in INTERRUPTED:
            raise SystemExit(result.exit_code)
        return result


def judge(text: str, record: ReferenceRecord, result: JobResult, plan: Plan) -> PlanReport:
    """What the workers of a plan returned, as a report."""
    returned = [found for found in result.results.values() if found is not None]
    refused = [found["refused"] for found in returned if "refused" in found]
    if refused:
        return PlanReport(plan=text, status="refused", reason=one_line(refused[0]))
    if result.failure is not None or not returned:
        reason = str(result.failure) if result.failure else f"the workers ended with exit code {result.exit_code}"
        return PlanReport(plan=text, status="failed", reason=reason)
    ranks = [RankFacts.from_json(found["facts"]) for found in returned]
    divergence = first_divergence(record, ranks)
    if divergence is not None and divergence.what == "gradient":
        divergence = down_to(divergence, ranks)
    if divergence is not None:
        divergence = replace(divergence, likely=divergence.likely + _more_likely(divergence, plan))
    left_out: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank.left_out.items():
            left_out[name] = left_out.get(name, 0) + count
    steps = [facts for rank in ranks for facts in rank.steps]
    return PlanReport(
        plan=text,
        status="failed" if divergence else "passed",
        reason=str(divergence) if divergence else None,
        steps=len(record.steps),
        loss_max_rel=max(facts.loss for facts in steps),
        grad_max_rel=max(facts.gradient for facts in steps),
        grad_norm_max_rel=max(facts.norm for facts in steps),
        weight_max_rel=max(facts.weights for facts in steps),
        state_max_rel=max(facts.state for facts in steps),
        left_out={name: count for name, count in left_out.items() if count},
        first_divergence=divergence,
    )


def _more_likely(divergence: Divergence, plan: Plan) -> str:
    """What else it may be where layers are computed again in backward, or things wait on the host."""
    again, away = f"recompute={plan.recompute}", f"offload={plan.offload}"
    more: list[tuple[str, str]] = []
    if plan.recompute != "none":  # the loss was right, so forward was
        more.append(("gradient", f"a layer is computed otherwise in backward than it was in forward ({again})"))
        more.append(("weight", f"a layer that is computed again in backward changes a buffer twice ({again})"))
    if plan.offload in ("activations", "all"):
        more.append(("gradient", f"what forward kept came back as something else ({away})"))
    if plan.offload in ("optimizer", "all"):
        more.append(("loss", f"the weights that are updated on the host were not brought here ({away})"))
    return "".join(f"; or {said}" for what, said in more if what == divergence.what)


def _discard(text: str) -> None:
    """The task has printed this before."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
