"""What each worker of ``stretto run`` does: the user's script, as if Python had been started with it."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from stretto.errors import TaskError
from stretto.launch.context import WorkerContext


def work(payload: dict[str, Any], context: WorkerContext) -> None:
    """Runs ``payload["script"]`` as ``__main__`` with ``payload["args"]``; ``stretto.start()`` in it finds its worker.

    The script's folder is on ``sys.path`` by the job.

    Raises:
        TaskError: the script is no valid Python. Whatever else the script raises is passed on.
    """
    script = str(payload["script"])
    sys.argv = [script, *payload["args"]]
    try:
        runpy.run_path(script, run_name="__main__")
    except SyntaxError as error:
        if error.filename != script:
            raise
        raise TaskError(f"script: {script}, line {error.lineno}: {error.msg}") from error
    if not context.coordinates:  # set where a group is formed
        raise TaskError(f"{script} never called stretto.start(); if it is a task: `stretto train {script}`")
