"""``stretto run``: a script that has its own loop, on some workers."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import SEEN_ONCE, HangOption, hang_seconds, shown_path, without_effect
from stretto.errors import LaunchError, nearest


def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script that calls stretto.start().")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="What the script finds in sys.argv.")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="N", help="Workers to start, each a process of its own.")
    ] = 1,
    hang_after: HangOption = None,
) -> None:
    """Run a script with its own loop, on some workers."""
    raise typer.Exit(launch_script(find_script(script), args or [], workers, hang_after))


def find_script(script: Path) -> Path:
    """The script's absolute path. Raises LaunchError with the nearest name where there is none."""
    if not script.is_file():
        names = [entry.name for entry in script.parent.iterdir()] if script.parent.is_dir() else []
        raise LaunchError(f"no script {script}{nearest(script.name, names)}")
    return script.resolve()


def launch_script(script: Path, args: list[str], workers: int, hang_after: float | None = None) -> int:
    """Runs the script in each worker. Returns the exit code."""
    from stretto.cli.display import Display
    from stretto.cli.launching import conclude
    from stretto.cluster import Cluster
    from stretto.launch import Job, LocalLauncher
    from stretto.preload import preloads

    # The run folder is the script's to choose, so the logs come to it at the end.
    with tempfile.TemporaryDirectory(prefix="stretto-logs-") as logs:
        with LocalLauncher(preloads(None)) as launcher, Display() as display:
            display.starting(workers)
            if note := without_effect(hang_after, workers):
                display.note(note)
            job = Job(
                entry="stretto.script:work",
                payload={"script": str(script), "args": args},
                num_workers=workers,
                threads=Cluster.measure().threads_per_worker(workers),
                hang_after=hang_seconds(hang_after),
                log_dir=Path(logs),
                python_path=(str(script.parent),),
            )
            result = launcher.run(job, display.on_event, display.on_output)
            if result.failure is None and display.run is not None:
                display.next_commands(next_commands(script, display.run, args, workers))
        if display.run is not None and display.run.is_dir():
            shutil.copytree(logs, display.run / "logs", dirs_exist_ok=True)
    return conclude(result, display, None)


def next_commands(script: Path, run: Path, args: list[str], workers: int) -> list[tuple[str, str]]:
    """Commands to try next, each with what it is for."""
    again = f"stretto run {shlex.quote(shown_path(script))} --workers {2 if workers == 1 else 1}"
    again += f" -- {shlex.join(args)}" if args else ""
    audit = f"stretto audit {shlex.quote(shown_path(run))}"
    return [(audit, SEEN_ONCE), (again, "the same on another number of workers")]
