"""Batches of any shape: what collate returns reaches the model as it is, on any device and from any process."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

from stretto.collate import collate
from stretto.data import to_device
from stretto.data.parcel import close, pack, unpack
from stretto.errors import TaskError
from stretto.task import _as_arguments, default_inputs

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    """Its constructor wants something else than its fields."""

    x: Tensor
    name: str

    def __post_init__(self) -> None:
        assert self.x.dtype != torch.float64, "it is copied, not constructed anew"


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


class Marked(Tensor):
    """A subclass that carries something beside its numbers."""

    mark: str


class Shy(dict[str, Any]):
    """A mapping that can't be constructed from values."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(a=first, b=second)


class Stubborn(list[Any]):
    """A list whose constructor takes no values."""

    def __init__(self) -> None:
        super().__init__([torch.ones(1)])


@dataclass
class Movable:
    """An object with a ``to`` of its own, which is no container of ours."""

    place: str = "cpu"


class Unknown:
    """An object that nothing is known of but where it lies."""

    def __init__(self, place: torch.device = CPU) -> None:
        self.place = place

    def to(self, place: torch.device) -> Unknown:
        return Unknown(place)


def marked() -> Marked:
    made = torch.ones(2).as_subclass(Marked)
    made.mark = "kept"
    return made


def tree() -> dict[str, Any]:
    factory: defaultdict[str, Any] = defaultdict(list, a=torch.ones(1))
    return {
        "tensor": torch.ones(2, 3),
        "whole": torch.tensor([1, 2]),
        "strings": ["a", "b"],
        "flags": (True, None, 3, 2.5, b"x"),
        "nested": {"inner": [{"deep": torch.ones(1)}, ()]},
        "ordered": OrderedDict(b=torch.ones(1), a=1),
        "factory": factory,
        "encoding": BatchEncoding({"input_ids": torch.tensor([[1]]), "x": torch.ones(1)}),
        "view": MappingProxyType({"x": torch.ones(1)}),
        "shy": Shy(1, 2),
        "pair": Pair(torch.ones(1), "y"),
        "frozen": Frozen(torch.ones(1), "n"),
        "slotted": Slotted(torch.ones(1)),
        "packed": pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]),
        "marked": marked(),
        "ragged": [torch.ones(3), torch.ones(1)],
        "sizes": torch.Size([2, 3]),
        "extremes": torch.ones(2, 2).max(0),
        "unknown": Unknown(),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "channels": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 2),
    }


def leaves(node: Any) -> list[Any]:
    """The types of all nodes, and what must stay of the leaves."""
    if isinstance(node, Tensor):
        return [type(node), tuple(node.shape), getattr(node, "mark", None)]
    kind: list[Any] = [type(node)]
    if isinstance(node, dict | MappingProxyType | BatchEncoding):
        return kind + [(key, leaves(value)) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return kind + [leaves(value) for value in node]
    names = ("x", "name") if isinstance(node, Frozen) else ("x",) if isinstance(node, Slotted) else ()
    return kind + [leaves(getattr(node, name)) for name in names] if names else [*kind, repr(node)[:9]]


def tensors(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, dict | MappingProxyType | BatchEncoding):
        return [each for value in node.values() for each in tensors(value)]
    if isinstance(node, list | tuple):
        return [each for value in node for each in tensors(value)]
    return [node.x] if isinstance(node, Frozen | Slotted) else []


def through_a_loader(node: Any) -> Any:
    files = pack(node)
    try:
        return unpack(files)
    finally:
        close(files)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda node: to_device(node, CPU, torch.float64), id="cast"),
        pytest.param(lambda node: to_device(node, META), id="moved"),
        pytest.param(through_a_loader, id="sent"),
    ],
)
def test_every_type_is_kept_ci02_ci06(way: Callable[[Any], Any]) -> None:
    before = tree()
    if way is through_a_loader:
        del before["view"]  # not even pickle can take it
    after = way(before)
    for name in before:
        assert leaves(after[name]) == leaves(before[name]), name
    assert leaves(before["marked"])[2] == "kept"
    assert after["factory"].default_factory is list
    assert [value.stride() for value in tensors(after)] == [value.stride() for value in tensors(before)]


def test_every_tensor_moves_and_real_floats_alone_are_cast() -> None:
    moved = to_device(tree(), META)
    assert {each.device.type for name, value in moved.items() if name != "packed" for each in tensors(value)} == {
        "meta"
    }
    assert moved["packed"].data.device == META and moved["unknown"].place == META
    cast = to_device(tree(), CPU, torch.float64)
    kinds = {each.dtype for name, value in cast.items() if name not in ("packed", "shy") for each in tensors(value)}
    assert kinds == {torch.float64, torch.int64}
    assert cast["packed"].data.dtype == torch.float64 and cast["packed"].batch_sizes.dtype == torch.int64
    assert cast["encoding"]["input_ids"].dtype == torch.int64 and cast["encoding"]["x"].dtype == torch.float64


def test_what_need_not_move_is_the_very_same_object() -> None:
    before = tree()
    assert to_device(before, CPU) is before
    cast = to_device(before, CPU, torch.float64)
    assert cast["unknown"] is before["unknown"] and cast["strings"] is before["strings"]
    assert before["tensor"].dtype == torch.float32, "the batch itself is left alone: loss reads it too"


def test_a_type_that_cannot_be_built_becomes_the_plain_one() -> None:
    assert type(to_device(Stubborn(), CPU, torch.float64)) is list
    assert type(to_device(Shy(torch.ones(1), 2), CPU, torch.float64)) is Shy, "copied, so its constructor isn't called"


def test_a_sent_tensor_is_whole_and_its_own() -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    before = {
        "large": large,
        "small": large[:5],
        "bits": large[:8].view(torch.int8),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    before |= {"strided": large[::7], "expanded": torch.ones(3).expand(4, 3), "scalar": torch.tensor(2.5)}
    descriptors = len(os.listdir("/proc/self/fd"))
    after = through_a_loader(before)
    assert len(os.listdir("/proc/self/fd")) == descriptors, "nothing stays open for a tensor that is kept"
    for name, value in before.items():
        assert torch.equal(after[name], value) and after[name].dtype == value.dtype, name
        after[name].add_(1)
    assert torch.equal(large, torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([{"x": 1, "y": [2, None]}, {"x": 1, "y": [2, 3]}], "sample['y'][1] is None in the first of 2"),
        ([Frozen(torch.ones(1), "n")] * 2, "sample is a Frozen, a dataclass"),
        ([(1, torch.ones(2)), (1, torch.ones(3))], "sample[1] has different shapes, such as (2,) and (3,)"),
        ([{"x": 1}, {"y": 1}], "sample['x'] is not in every one"),
        ([Pair([1], 2), Pair([1, 2], 2)], "sample.x has different lengths, such as 1 and 2"),
        ([{"x": Unknown()}] * 2, "sample['x'] is of type Unknown"),
        ([(1, 2), 3], "sample is of type tuple here and int there"),
        ([torch.ones(1), torch.ones(1, device="meta")], "default_collate says"),
    ],
)
def test_what_cannot_be_collated_is_named_with_the_way_out(samples: list[Any], says: str) -> None:
    with pytest.raises(TaskError) as caught:
        collate(samples)
    assert says in str(caught.value) and "write collate(samples)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dataclass_is_a_mapping_by_its_fields() -> None:
    def forward(x: Tensor, labels: Tensor | None = None) -> None: ...

    batch = Slotted(torch.ones(1))
    assert default_inputs(batch, forward) == ((), {"x": batch.x})


def test_a_model_is_called_with_what_inputs_says_ci06() -> None:
    packed = pack_sequence([torch.ones(2)])
    pair = Pair(1, 2)
    assert _as_arguments((1, pair)) == ((1, pair), {})
    assert _as_arguments(pair) == ((pair,), {}), "a named tuple is one argument"
    (only,), none = _as_arguments(packed)
    assert isinstance(only, PackedSequence) and not none
    assert _as_arguments({"x": 1}) == ((), {"x": 1})
    assert _as_arguments({}) == ((), {}) and _as_arguments(()) == ((), {}), "no arguments at all"
