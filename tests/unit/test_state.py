"""Boxes, specs, slices, owners and sources."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from state_cuts import DTYPES, bits, cut_slices, cuts, random_tensor, shapes
from stretto.state import Box, MemorySource, Slice, SliceSource, TensorSpec, assign_owners, tiling_fault
from stretto.state.dtypes import dtype_name, item_bytes, torch_dtype


def test_pure_users_of_state_do_not_pay_for_torch() -> None:
    code = "import sys, stretto.state; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_boxes_intersect_and_index() -> None:
    whole, part = Box.whole((4, 6)), Box((1, 2), (3, 6))
    assert (part.shape, part.numel, Box.whole(()).numel, Box.whole((0, 3)).numel) == ((2, 4), 8, 1, 0)
    assert part.intersect(Box((2, 0), (4, 3))) == Box((2, 2), (3, 3))
    assert part.intersect(Box((3, 0), (4, 6))) is None
    assert part.within(whole) == (slice(1, 3), slice(2, 6))
    assert Box((2, 3), (3, 4)).within(part) == (slice(1, 2), slice(1, 2))
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert str(part) == "[1:3, 2:6]"


@pytest.mark.parametrize(("starts", "stops"), [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,))])
def test_impossible_boxes_are_refused(starts: tuple[int, ...], stops: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box needs"):
        Box(starts, stops)


def test_a_box_outside_and_one_of_other_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0:5\] is not inside \[0:4\]"):
        Box((0,), (5,)).within(Box.whole((4,)))
    with pytest.raises(ValueError, match="1 and 2 dimensions"):
        Box.whole((4,)).intersect(Box.whole((4, 4)))


@given(st.data())
def test_cuts_tile_and_each_loss_or_overlap_is_seen(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    boxes = data.draw(cuts(shape))
    assert tiling_fault(shape, boxes) is None
    solid = [index for index, box in enumerate(boxes) if box.numel]
    if solid:
        index = data.draw(st.sampled_from(solid))
        without = boxes[:index] + boxes[index + 1 :]
        expected = "elements are in no part" if without else "no part of it is there"
        assert expected in (tiling_fault(shape, without) or "")
        assert "overlap" in (tiling_fault(shape, [*boxes, boxes[index]]) or "")


def test_overlap_that_hides_a_gap_is_seen() -> None:
    """The counts agree: 3 + 3 = 6."""
    fault = tiling_fault((6,), [Box((0,), (3,)), Box((2,), (5,))])
    assert fault == "the parts [0:3] and [2:5] overlap"


def test_a_part_outside_is_seen() -> None:
    assert tiling_fault((2,), [Box((0,), (3,))]) == "the part [0:3] is outside shape (2,)"


def test_many_parts_are_checked_quickly() -> None:
    """4096 columns: comparing all pairs would take 8 million steps."""
    boxes = [Box((0, column), (9, column + 1)) for column in range(4096)]
    assert tiling_fault((9, 4096), boxes) is None


def test_slices_must_fit_their_box() -> None:
    spec = TensorSpec("w", (4, 6), "float32")
    box = Box((0, 0), (2, 6))
    assert Slice(spec, box, torch.zeros(2, 6), owner=True).data.shape == box.shape
    with pytest.raises(ValueError, match=r"needs data of shape \(2, 6\), got \(6, 2\)"):
        Slice(spec, box, torch.zeros(6, 2), owner=True)
    with pytest.raises(ValueError, match="expected elements of type float32, got float64"):
        Slice(spec, box, torch.zeros(2, 6, dtype=torch.float64), owner=True)
    with pytest.raises(ValueError, match="is not inside shape"):
        Slice(spec, Box((0, 0), (5, 6)), torch.zeros(5, 6), owner=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_element_types_are_known_by_torchs_names_and_sizes(dtype: str) -> None:
    assert dtype_name(torch_dtype(dtype)) == dtype
    assert torch.empty(1, dtype=torch_dtype(dtype)).element_size() == item_bytes(dtype)


def test_an_unknown_element_type_gets_the_nearest_offered() -> None:
    with pytest.raises(ValueError, match="did you mean 'float32'"):
        TensorSpec("w", (1,), "float23")


def test_owners_are_balanced_and_the_same_in_any_order() -> None:
    specs = [TensorSpec(f"p{i}", (1 + 37 * i % 101, 16), "float32") for i in range(60)]
    owners = assign_owners(specs, 4)
    assert owners == assign_owners(reversed(specs), 4)
    loads: Counter[int] = Counter()
    for spec in specs:
        loads[owners[spec.name]] += spec.num_bytes
    assert len(loads) == 4
    assert max(loads.values()) - min(loads.values()) <= max(spec.num_bytes for spec in specs)
    assert max(loads.values()) < 1.02 * min(loads.values())


def test_owners_refuse_nobody_and_a_name_given_twice() -> None:
    spec = TensorSpec("p", (2,), "float32")
    with pytest.raises(ValueError, match="at least one holder"):
        assign_owners([spec], 0)
    with pytest.raises(ValueError, match="listed twice"):
        assign_owners([spec, spec], 2)


@given(st.data())
def test_slices_of_any_cut_read_as_any_box(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    tensor = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    memory = MemorySource({"w": tensor})
    source = SliceSource(cut_slices(memory, "w", data.draw(cuts(shape))))
    assert source.spec("w") == memory.spec("w")
    for box in data.draw(cuts(shape)):
        expected = tensor[box.within(Box.whole(shape))]
        assert bits(source.read("w", box)) == bits(expected) == bits(memory.read("w", box))


def test_what_is_read_is_the_callers_own() -> None:
    tensor = torch.zeros(3)
    memory = MemorySource({"w": tensor})
    slices = SliceSource([Slice(memory.spec("w"), Box.whole((3,)), tensor, owner=True)])
    memory.read("w", Box.whole((3,))).fill_(1)
    slices.read("w", Box.whole((3,))).fill_(1)
    assert tensor.tolist() == [0, 0, 0]


def test_overlapping_replicas_do_not_hide_a_gap() -> None:
    memory = MemorySource({"w": torch.arange(6.0)})
    replicas = SliceSource(cut_slices(memory, "w", [Box((0,), (3,)), Box((0,), (3,))]))
    assert replicas.read("w", Box((1,), (3,))).tolist() == [1, 2]
    with pytest.raises(ValueError, match="3 of the 6 elements"):
        replicas.read("w", Box.whole((6,)))


def test_unknown_names_get_the_nearest_offered_and_specs_must_agree() -> None:
    memory = MemorySource({"model/weight": torch.zeros(2)})
    with pytest.raises(KeyError, match="did you mean 'model/weight'"):
        memory.read("model/wieght", Box.whole((2,)))
    one, other = TensorSpec("w", (2,), "float32"), TensorSpec("w", (3,), "float32")
    box = Box((0,), (2,))
    with pytest.raises(ValueError, match="disagree"):
        SliceSource([Slice(one, box, torch.zeros(2), True), Slice(other, box, torch.zeros(2), True)])
