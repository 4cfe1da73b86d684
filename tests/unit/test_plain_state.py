"""State that is no tensor comes back from a checkpoint as it went in."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from stretto.checkpoint import pack, unpack
from stretto.errors import CheckpointError


@pytest.mark.parametrize(
    "value",
    [
        {"milestones": Counter({4: 1, 6: 2}), "gamma": 0.1, "last": -1},
        {1: "a", (2, 3): [None, True], "b": {"c": ()}},
        {"__tuple__": 3, "__pairs__": [1]},
        [[], {}, (1, (2.5, "x"))],
    ],
)
def test_there_and_back(value: Any) -> None:
    found = unpack(json.loads(json.dumps(pack(value, "it"))))
    assert found == value and type(found) is type(value)


def test_schedules_go_on_after_their_milestones() -> None:
    def made() -> torch.optim.lr_scheduler.LRScheduler:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        inner = torch.optim.lr_scheduler
        return inner.ChainedScheduler([inner.MultiStepLR(optimizer, [2, 4]), inner.ExponentialLR(optimizer, 0.9)])

    whole, first, second = made(), made(), made()
    first.step()
    second.load_state_dict(unpack(json.loads(json.dumps(pack(first.state_dict(), "it")))))
    second.optimizer.param_groups[0]["lr"] = first.optimizer.param_groups[0]["lr"]
    whole.step()
    for _ in range(4):
        whole.step()
        second.step()
        assert second.optimizer.param_groups[0]["lr"] == pytest.approx(whole.optimizer.param_groups[0]["lr"])


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(CheckpointError, match="the schedule holds a object"):
        pack({"a": [object()]}, "the schedule")
    assert pack(torch.tensor(0.5), "it") == 0.5
