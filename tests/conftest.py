"""One launcher for all tests that train: its fork server imports torch, five seconds of one core, once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stretto.launch import LocalLauncher
from stretto.plan import Plan
from stretto.preload import preloads
from stretto.verify.run import preloads as preloads_to_verify

PLAN = "dp=2,zero=3"


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    both = (*preloads(Plan.parse(PLAN)), *preloads_to_verify([PLAN]))
    with LocalLauncher(tuple(dict.fromkeys(both))) as running:
        yield running
