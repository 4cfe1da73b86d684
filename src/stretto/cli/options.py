"""Options that several commands share, and what their text means. Needs neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from stretto.errors import TaskError, UserError, nearest
from stretto.task import resolve_task_path

SEEN_ONCE: Final = "was every sample seen once an epoch?"

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="A task: a Python file, or a folder that holds task.py.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `stretto train` makes it.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, metavar="N", help="Workers to start, each a process of its own.")
]
PlanOption = Annotated[
    str | None,
    typer.Option("--plan", metavar="PLAN", help="Where it runs: dp=2, or dp=2,zero=3 to shard everything."),
]
TrainPlanOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="Where it runs: dp=2, or dp=2,zero=3; auto: the planner looks at every plan. [default: it looks briefly; "
        "with --workers N: dp=N]",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task or a field of the recipe; repeatable."),
]
StopAfterOption = Annotated[
    int | None,
    typer.Option("--stop-after", min=1, metavar="STEP", help="Save and leave after this step; `resume` goes on."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Train even where the plan would change the numbers; the run folder records it.")
]
HangOption = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        min=0,
        metavar="SECONDS",
        help="End the run, and say which worker holds the others up, once nothing has moved for so long; 0: never. "
        "[default: 300]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


def parse_sets(given: Sequence[str] | None) -> dict[str, str]:
    """``["depth=2"]`` as ``{"depth": "2"}``. Raises UserError for a piece without ``=`` and for a key given twice."""
    found: dict[str, str] = {}
    for piece in given or ():
        key, equals, value = piece.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {piece}: expected --set KEY=VALUE, as in --set steps=100")
        if key.strip() in found:
            raise UserError(f"--set {key.strip()} is given twice; give it once")
        found[key.strip()] = value
    return found


def hang_seconds(given: float | None) -> float:
    """The limit that ``--hang-after`` gives, or the usual one."""
    from stretto.watch import HANG_AFTER_SECONDS

    return HANG_AFTER_SECONDS if given is None else given


def without_effect(hang_after: float | None, workers: int) -> str:
    """Why ``--hang-after`` does nothing here; empty where it does something, or was not given."""
    return "--hang-after has no effect: a lone worker waits for nobody" if hang_after and workers == 1 else ""


def find_task(text: str) -> Path:
    """The task's file. Raises TaskError with the nearest names, or with the tasks that a folder holds."""
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "task.py").is_file():
        tasks = sorted(entry.name for entry in path.iterdir() if (entry / "task.py").is_file())
        files = sorted(entry.name for entry in path.glob("*.py"))
        if found := [*tasks, *files]:
            shown = ", ".join(str(path / name) for name in found[:8])
            raise TaskError(f"task: the folder {text} holds no task.py; there is {shown}")
    if not path.exists() and not path.parent.is_dir():
        top = next(parent for parent in path.parents if parent.parent.is_dir())
        names = [entry.name for entry in top.parent.iterdir()]
        raise TaskError(f"task: no file {text}: there is no folder {top}{nearest(top.name, names)}")
    return resolve_task_path(path)


def write_picture(file: Path, text: str) -> None:
    """What ``--picture`` asks for. Raises UserError where the file can't be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--picture: {file} can't be written: {error.strerror}") from error


def shown_path(path: Path | str) -> str:
    """The path as a person would type it from here; a task's folder stands for its ``task.py``."""
    absolute = Path(path).absolute()
    absolute = absolute.parent if absolute.name == "task.py" else absolute
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
