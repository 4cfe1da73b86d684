"""The digest: the same under every cut, different after any change."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from state_cuts import DTYPES, bits, cuts, random_tensor, shapes
from stretto.state import Box, TensorSpec
from stretto.state.digest import combine, format_digest, partial_digest


def digest(tensor: torch.Tensor) -> int:
    return partial_digest(tensor, Box.whole(tensor.shape), tensor.shape)


def digest_cut(tensor: torch.Tensor, boxes: list[Box]) -> int:
    whole = Box.whole(tensor.shape)
    return combine(partial_digest(tensor[box.within(whole)], box, tensor.shape) for box in boxes)


@given(st.data())
def test_every_cut_gives_the_same_digest(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    tensor = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    assert digest_cut(tensor, data.draw(cuts(shape))) == digest(tensor)


@pytest.mark.parametrize("shape", [(40000, 3), (3, 40000), (70, 30, 50), (5, 1100, 40), (100000,)])
def test_cuts_larger_than_a_block_give_the_same_digest(shape: tuple[int, ...]) -> None:
    """Both ways through the data (long runs, short runs), over several blocks, cut in every dimension."""
    tensor = random_tensor(shape, "float32")
    for axis, extent in enumerate(shape):
        for at in (1, extent // 2, extent - 1):
            stops = (*shape[:axis], at, *shape[axis + 1 :])
            starts = (*(0 for _ in shape[:axis]), at, *(0 for _ in shape[axis + 1 :]))
            boxes = [Box((0,) * len(shape), stops), Box(starts, shape)]
            assert digest_cut(tensor, boxes) == digest(tensor), (axis, at)


@given(st.data())
def test_one_flipped_bit_changes_it(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([name for name in DTYPES if name != "bool"]))
    tensor = random_tensor(data.draw(shapes().filter(lambda shape: 0 not in shape)), dtype)
    raw = bytearray(bits(tensor))
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    flipped = torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)
    assert digest(flipped) != digest(tensor)


@given(st.data())
def test_two_swapped_elements_change_it(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = random_tensor((data.draw(st.integers(2, 300)),), dtype)
    i, j = data.draw(st.integers(0, len(tensor) - 1)), data.draw(st.integers(0, len(tensor) - 1))
    assume(bits(tensor[i]) != bits(tensor[j]))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    assert digest(swapped) != digest(tensor)


def test_no_two_of_many_small_changes_give_one_digest() -> None:
    """A sum of weak numbers would meet itself: 4 values at 3000 places, one and two at a time."""
    seen = {digest(torch.zeros(3000))}
    for place in range(3000):
        for value in (1.0, -1.0, 2.0, -0.0):
            tensor = torch.zeros(3000)
            tensor[place] = value
            tensor[(place * 7 + 1) % 3000] = -value
            seen.add(digest(tensor))
    assert len(seen) == 1 + 4 * 3000


def test_shape_and_type_are_part_of_it_and_the_name_is_not() -> None:
    specs = [
        TensorSpec("a", (2, 3), "float32"),
        TensorSpec("a", (3, 2), "float32"),
        TensorSpec("a", (2, 3), "int32"),
    ]
    assert len({format_digest(spec, 5) for spec in specs}) == 3
    assert format_digest(specs[0], 5) == format_digest(TensorSpec("b", (2, 3), "float32"), 5)
    assert format_digest(specs[0], 5) != format_digest(specs[0], 6)


def test_it_is_the_same_for_ever() -> None:
    """Written in manifests: a digest of another version of the program must still match."""
    assert f"{digest(torch.arange(10, dtype=torch.float32)):016x}" == "b8a1e7c138855af9"
    assert f"{digest(torch.tensor(1.5, dtype=torch.complex128)):016x}" == "c94bea0dd28c0217"
    assert format_digest(TensorSpec("a", (0, 3), "bool"), digest(torch.empty(0, 3))) == "cfa1b2140f0ae3b4"


def test_views_count_by_their_values() -> None:
    tensor = random_tensor((6, 4), "float32")
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    number = torch.randn(5, dtype=torch.complex64)
    assert digest(number.conj()) == digest(number.conj().resolve_conj())


def test_data_that_is_not_the_box_is_refused() -> None:
    with pytest.raises(ValueError, match="is not the box"):
        partial_digest(torch.zeros(3), Box((0,), (2,)), (4,))
    with pytest.raises(ValueError, match="is not the box"):
        partial_digest(torch.zeros(3), Box((2,), (5,)), (4,))


@pytest.mark.alone
def test_it_is_quick_and_takes_no_memory_of_the_tensors_size() -> None:
    """10 million float32; the bar is 1.5 s for 100 million on one core."""
    tensor = torch.zeros(10_000_000)
    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        digest(tensor)
        seconds.append(time.thread_time() - begin)
    tracemalloc.start()
    digest(tensor)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(seconds) < 0.15
    assert peak_bytes < 2_000_000
