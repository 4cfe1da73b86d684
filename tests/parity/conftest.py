"""One launcher for every proof: its fork server imports torch and the tasks' libraries once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stretto.launch import LocalLauncher
from stretto.verify.run import preloads

TASK_LIBRARIES = ("sklearn.datasets", "transformers.models.llama.modeling_llama")


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    with LocalLauncher((*preloads(["dp=2,zero=3"]), *TASK_LIBRARIES)) as running:
        yield running
