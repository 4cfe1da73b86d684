"""The limit on open files: raised as far as it goes, and told in one line where that is not far enough."""

from __future__ import annotations

import errno
import resource
from typing import Final

from stretto.errors import LaunchError

_FILES: Final = 32  # of a worker by itself: standard streams, logs, ledger, checkpoint, channels, libraries
_FILES_A_PEER: Final = 2  # connections to each other worker


def raise_open_files() -> None:
    """Raises this process's soft limit to the hard one; what it starts inherits it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_open_files(num_workers: int) -> None:
    """Raises LaunchError where each of so many workers may need more open files than the hard limit lets it have.

    Torch ends the process without a word where a connection finds no descriptor, so this is told beforehand.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_A_PEER * num_workers
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"the limit on open files is {hard}, and each of {num_workers} workers may need {needed}: raise it, "
            f"as by `ulimit -n {max(1024, needed)}`, or ask for fewer workers"
        )


def out_of_files(error: BaseException) -> str | None:
    """A line for an error that says that too many files are open; None for any other."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f" while opening {error.filename}" if error.filename else ""
    return f"too many open files{what}: the limit is {soft}; raise it (`ulimit -n`), or close what is not needed"
