"""``stretto verify``: one device against each plan, number by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import JsonOption, SetOption, TaskArgument, find_task, parse_sets

if TYPE_CHECKING:
    from stretto.verify import PlanReport, VerifyReport

_COLUMNS = ("loss", "gradients", "grad norm", "weights", "state", "left out")


def verify_command(
    task: TaskArgument,
    plans: Annotated[
        list[str], typer.Option("--plan", metavar="PLAN", help="A plan to prove, such as dp=2,zero=3; repeatable.")
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to compare.")] = 5,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Prove that plans keep the numbers of one device, in float64."""
    from json import dumps

    from stretto.launch import LocalLauncher
    from stretto.verify import verify
    from stretto.verify.run import preloads

    path, given = find_task(task), parse_sets(sets)
    with LocalLauncher(preloads(plans)) as launcher:
        if not json:
            print(f"{task}: one device against {len(plans)} plan{'s' if len(plans) > 1 else ''} ...", flush=True)
        table = _Table(plans)
        report = verify(path, plans, given, steps, launcher=launcher, on_plan=None if json else table.add)
    if json:
        print(dumps(report.to_json()))
    else:
        print(verdict(report))
    raise typer.Exit(0 if report.passed else 1)


class _Table:
    """Prints a row as soon as its plan is done."""

    def __init__(self, plans: list[str]) -> None:
        self._width = max(len("plan"), *map(len, plans))
        self._begun = False

    def add(self, plan: PlanReport) -> None:
        """One row, and below it what there is to say in words."""
        if not self._begun:
            self._begun = True
            heads = "".join(f"{name:>11}" for name in _COLUMNS)
            print(f"\n{'plan':<{self._width}}  status  {heads}")
        print(f"{plan.plan:<{self._width}}  {plan.status:<8}{_cells(plan)}".rstrip(), flush=True)
        if plan.first_divergence is not None:
            print(f"    first: {plan.first_divergence}", flush=True)
        elif plan.reason:
            print("\n".join(f"    {line}" for line in plan.reason.splitlines()), flush=True)


def _cells(plan: PlanReport) -> str:
    measures = (
        plan.loss_max_rel,
        plan.grad_max_rel,
        plan.grad_norm_max_rel,
        plan.weight_max_rel,
        plan.state_max_rel,
    )
    if plan.grad_max_rel is None:
        return ""
    numbers = "".join(f"{'-' if value is None else format(value, '.1e'):>11}" for value in measures)
    return f"{numbers}{_total(plan.left_out):>11,}"


def _total(left_out: Mapping[str, int]) -> int:
    return sum(left_out.values())


def verdict(report: VerifyReport) -> str:
    """One line on all plans, and one on what was left out."""
    count = {status: sum(plan.status == status for plan in report.plans) for status in ("passed", "failed", "refused")}
    told = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    lines = [f"\n{told}; largest relative differences from one device, in {report.dtype}"]
    left_out = {name for plan in report.plans for name in plan.left_out}
    if left_out:
        shown = ", ".join(sorted(left_out)[:4]) + (f" and {len(left_out) - 4} more" if len(left_out) > 4 else "")
        lines.append(f"left out: elements of weights and state whose gradient is rounding noise, in {shown}")
    return "\n".join(lines)
