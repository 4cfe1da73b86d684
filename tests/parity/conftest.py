"""One launcher for every proof: its fork server imports torch and the tasks' libraries once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from parity import Figures
from stretto.launch import LocalLauncher
from stretto.verify.run import preloads

TASK_LIBRARIES = (
    "sklearn.datasets",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    with LocalLauncher((*preloads(["dp=2,zero=3", "tp=2"]), *TASK_LIBRARIES)) as running:
        yield running


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Iterator[Figures]:
    """Rows of the table that is printed after the last test."""
    noted = Figures()
    yield noted
    capture: Any = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n" + noted.table())
