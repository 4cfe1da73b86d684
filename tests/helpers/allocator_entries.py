"""What a worker says of its allocator."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from stretto.launch import WorkerContext
from stretto.observe import allocator, give_back, rss_bytes

PIECE, PIECES = 100_000, 2000


def work(payload: Any, context: WorkerContext) -> dict[str, Any]:
    """Its name, the libraries of this process, and how much 200 MB take: held, freed, given back."""
    before = rss_bytes()
    sizes = list[int]()
    calls = ctypes.CDLL(None)
    calls.malloc.restype, calls.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    calls.free.argtypes = [ctypes.c_void_p]
    pieces = [calls.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    sizes.append(rss_bytes() - before)
    for piece in pieces[:-1]:  # the last one, at the heap's end, keeps glibc from giving back by itself
        calls.free(piece)
    sizes.append(rss_bytes() - before)
    give_back()
    sizes.append(rss_bytes() - before)
    calls.free(pieces[-1])
    libraries = {word for word in Path("/proc/self/maps").read_text(encoding="utf-8").split() if word.startswith("/")}
    variable = os.environ.get("LD_PRELOAD")
    return {"allocator": allocator(), "libraries": sorted(libraries), "variable": variable, "sizes": sizes}
