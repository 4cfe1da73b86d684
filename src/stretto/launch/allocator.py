"""The memory allocator that workers on the CPU run on: tcmalloc, where this machine has it.

glibc's heap breaks up under the blocks of training; see docs/decisions/0035.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

LIBRARY: Final = "libtcmalloc_minimal.so.4"
_CHOICE: Final = "LD_PRELOAD"


def allocator_library() -> str:
    """The path of tcmalloc's library; empty where none is found."""
    own = dict.fromkeys((sys.prefix, sys.base_prefix))  # conda's packages bring it there
    system = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/local/lib")
    for folder in (*(f"{prefix}/lib" for prefix in own), *system):
        if (found := Path(folder, LIBRARY)).is_file():
            return str(found)
    return ""


def allocator_is_chosen() -> bool:
    """Whether the user has set ``LD_PRELOAD``, even to nothing: then it's theirs to say what workers run on."""
    return _CHOICE in os.environ


def allocator_variables() -> dict[str, str]:
    """What a process has to find in its environment when it starts, to run on tcmalloc."""
    library = "" if allocator_is_chosen() else allocator_library()
    return {_CHOICE: library} if library else {}


def forget_variables(names: list[str]) -> None:
    """Takes out of this process's environment what only it should have found there, not what it starts."""
    for name in names:
        os.environ.pop(name, None)
