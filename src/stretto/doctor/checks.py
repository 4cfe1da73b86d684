"""What makes distributed jobs fail, looked for before they do."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from stretto.comm.shm_memory import PAGE, SharedMemory
from stretto.errors import LaunchError, UserError, one_line
from stretto.launch.allocator import allocator_is_chosen, allocator_library
from stretto.launch.context import check_interface
from stretto.launch.limits import check_open_files

LEAST_TORCH: Final = (2, 11)
LEAST_YEAR: Final = 2025
LEAST_DISK: Final = 2 * 2**30
SHARED: Final = 64 * 2**20
_SOON: Final = 0.5  # seconds in which a name should be found


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        said: what was found.
        mend: what to do; empty where nothing is wrong.
    """

    name: str
    said: str
    mend: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.mend

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"name": self.name, "passed": self.passed, "said": self.said, "mend": self.mend}


def checks(workers: int, folder: Path) -> Iterator[Check]:
    """All of them, for so many workers on this host that keep their runs in ``folder``."""
    yield _versions()
    yield _shared_memory()
    yield _allocator()
    yield _open_files(workers)
    yield _interface()
    yield _ports()
    yield _name()
    yield _clock()
    yield _disk(folder)


def _versions() -> Check:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check("torch", "not installed", "install it: pip install torch")
    number = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    least = ".".join(map(str, LEAST_TORCH))
    python = ".".join(map(str, sys.version_info[:3]))
    mend = "" if number >= LEAST_TORCH else f"stretto needs torch {least} or newer: pip install -U torch"
    return Check("versions", f"Python {python}, torch {found}", mend)


def _shared_memory() -> Check:
    with SharedMemory(PAGE + SHARED) as memory:
        offer = memory.offer()
        why = offer["why"] or memory.take(offer)
    if why:
        return Check("shared memory", why, "workers of this host will talk over sockets, which is slower; free memory")
    return Check("shared memory", f"{SHARED >> 20} MiB between processes")


def _allocator() -> Check:
    """None is wrong: on the CPU glibc's takes more memory, how much more hangs on chance; who has named one has
    a reason to."""
    if allocator_is_chosen():
        return Check("memory allocator", "LD_PRELOAD is set, so workers run on what it says")
    if library := allocator_library():
        return Check("memory allocator", f"tcmalloc; torchrun's and Slurm's workers need LD_PRELOAD={library} for it")
    ways = "apt-get install libtcmalloc-minimal4, dnf install gperftools-libs, or conda install gperftools"
    return Check("memory allocator", f"the C library's; with tcmalloc workers on the CPU take less memory: {ways}")


def _open_files(workers: int) -> Check:
    try:
        check_open_files(workers)
    except LaunchError as error:
        what, _, mend = one_line(error).partition(": ")
        return Check("open files", what, mend)
    return Check("open files", f"enough for {workers} workers")


def _interface() -> Check:
    try:
        check_interface()
    except UserError as error:
        return Check("network interface", one_line(error), "unset GLOO_SOCKET_IFNAME, or name one that is there")
    names = ", ".join(name for _, name in socket.if_nameindex())
    return Check("network interface", f"there are {names}")


def _ports() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 1):
            return Check("ports", "a free port of this host takes connections")
    except OSError as error:
        said = f"no connection within this host: {error.strerror}"
        return Check("ports", said, "look at the firewall's rules for lo")


def _name() -> Check:
    name, began = socket.gethostname(), time.perf_counter()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        mend = f"add a line for {name} to /etc/hosts; other hosts find this one by its address only"
        return Check("name resolution", f"{name} isn't found ({error.strerror})", mend)
    took = time.perf_counter() - began
    said = f"{name} is {address}, found in {1e3 * took:.0f} ms"
    mend = "" if took < _SOON else f"a slow name server delays each start; add a line for {name} to /etc/hosts"
    return Check("name resolution", said, mend)


def _clock() -> Check:
    now = time.gmtime()
    if now.tm_year < LEAST_YEAR:
        said = f"it is {time.strftime('%Y-%m-%d', now)} here"
        return Check("clock", said, "set the clock: certificates and logs need it")
    return Check("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", now))


def _disk(folder: Path) -> Check:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    if not os.access(there, os.W_OK):
        return Check("disk", f"{there} can't be written", "give --run a folder that can, or change its rights")
    free = shutil.disk_usage(there).free
    rate = write_rate(there)
    said = f"{free / 1e9:,.0f} GB free in {there}, written at {rate / 1e6:,.0f} MB/s"
    return Check("disk", said, "" if free >= LEAST_DISK else "checkpoints need room: free some, or set keep=1")


def write_rate(folder: Path, num_bytes: int = 2**25) -> float:
    """Bytes a second to disk, flushed."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(num_bytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)
