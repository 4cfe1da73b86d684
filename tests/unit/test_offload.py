"""What waits on the host: plans that say so, and what a forward's tensors go through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from stretto.comm.group import Group, Rendezvous
from stretto.errors import PlanError
from stretto.parallel import BoundOptimizer, Manner, Template, apply, offload
from stretto.parallel.batchnorm import GlobalBatchNorm
from stretto.parallel.offload import LEAST_BYTES, Mover, to_host
from stretto.parallel.recompute import Recomputed
from stretto.plan import Plan

WIDTH = 128  # a square matrix has twice LEAST_BYTES
CPU = torch.device("cpu")


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Bytes that went to the host, one entry a move, and those that came back (negative)."""
    noted: list[Any] = []
    init, back = offload._Storage.__init__, offload._Storage.back

    def note(self: Any, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        init(self, tensor, storage)
        noted.append(storage.nbytes())

    def come(self: Any) -> Any:
        last = self._back
        found = back(self)
        if self._back is not last:
            noted.append(-found.nbytes())
        return found

    monkeypatch.setattr(offload._Storage, "__init__", note)
    monkeypatch.setattr(offload._Storage, "back", come)
    yield noted


def saving(*kept: Tensor) -> saved_tensors_hooks:
    mover = Mover(CPU, kept)
    return saved_tensors_hooks(mover.pack, mover.unpack)


def square(**more: Any) -> Tensor:
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, **more)


# --------------------------------------------------------------------------------------------------- the plan


def test_a_plan_says_what_waits_on_the_host() -> None:
    plan = Plan.parse("dp=2, zero=3, offload = all")
    assert plan == Plan(dp=2, zero=3, offload="all") != Plan(dp=2, zero=3)
    assert str(plan) == "dp=2,zero=3,offload=all" and Plan.parse(str(plan)) == plan
    assert str(Plan.parse("offload=none")) == "dp=1" and Plan.parse("offload=none") == Plan()
    assert str(plan.on(3)) == "dp=3,zero=3,offload=all"
    assert str(Plan.parse("offload=optimizer,recompute=full")) == "dp=1,recompute=full,offload=optimizer"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("offload=optimiser", "none, optimizer, activations or all, got 'optimiser'; did you mean 'optimizer'"),
        ("offload", "got ''"),
        ("offload=1", "got '1'"),
        ("offload=all,offload=none", "given twice"),
        ("ofload=all", "did you mean 'offload'"),
    ],
)
def test_what_can_t_wait_there_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(text)


# ------------------------------------------------------------------------------------------------ activations


def test_gradients_are_bit_for_bit_those_of_keeping_everything(moves: list[int]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.GELU()).double()
    x, found = square(), []
    for hooks in (False, True):
        model.zero_grad()
        if hooks:
            with saving(*model.parameters()):
                out = model(x).square().sum()
        else:
            out = model(x).square().sum()
        out.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 4 and all(torch.equal(*pair) for pair in zip(*found, strict=True))
    there = [n for n in moves if n > 0]
    assert len(there) == 4, "the input, what relu and the second layer keep (once), what gelu and square keep"


def test_views_of_one_memory_and_what_is_saved_twice_are_moved_once(moves: list[int]) -> None:
    x = square(requires_grad=True)
    with saving(x):
        h = x * 2.0  # keeps nothing
        one, other = h.chunk(2)
        out = (one * other).sum() + (h.t() @ h).sum() + h.exp().mean()
    assert [n for n in moves if n > 0] == [h.untyped_storage().nbytes()] * 2, "h, and what exp returned"
    expected = torch.autograd.grad(_again(x), x)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)
    assert len([n for n in moves if n < 0]) == 3, "once for each operator that needs it, be it for two of its inputs"


def _again(x: Tensor) -> Tensor:
    h = x * 2.0
    one, other = h.chunk(2)
    return (one * other).sum() + (h.t() @ h).sum() + h.exp().mean()


def test_weights_buffers_and_views_of_them_stay(moves: list[int]) -> None:
    weight, buffer = nn.Parameter(square()), square()
    frozen, gathered = nn.Parameter(square(), requires_grad=False), nn.Parameter(square())  # FSDP2 makes such later on
    x = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
    with saving(weight, buffer, frozen):
        out = (x @ weight.t() @ frozen.t() * buffer[0] * buffer.t()[1]) @ gathered.t()[:, :64]
    assert not moves
    out.sum().backward()
    assert weight.grad is not None and gathered.grad is not None


def test_small_tensors_stay(moves: list[int]) -> None:
    x = torch.randn(LEAST_BYTES // 8 - 1, dtype=torch.float64, requires_grad=True)
    with saving():
        small = x.exp().sum()
    assert not moves
    small.backward()
    with saving():
        torch.cat([x, x[:1]]).exp().sum().backward()
    assert moves


def test_the_device_s_memory_is_free_between_forward_and_backward() -> None:
    def run() -> tuple[Tensor, StorageWeakRef]:
        h = square(requires_grad=True).exp()
        return h.sum(), StorageWeakRef(h.untyped_storage())  # type: ignore[no-untyped-call]

    kept, memory = run()
    assert not memory.expired(), "exp keeps what it returns"  # type: ignore[no-untyped-call]
    with saving():
        moved, memory = run()
    assert memory.expired()  # type: ignore[no-untyped-call]
    assert kept.requires_grad and moved.requires_grad


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there() -> None:
    leaves = [square(requires_grad=True) for _ in range(20)]
    with saving(*leaves):
        sums = [leaf.exp().sum() for leaf in leaves]  # each exp is gone, but for its copy, before the next
    torch.stack(sums).sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and torch.equal(leaf.grad, leaf.detach().exp())


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda h: h.mul_(2), lambda h: h[0].mul_(2), lambda h: h.detach().mul_(2)],
    ids=["whole", "view", "detached"],
)
def test_a_change_in_place_is_an_error_as_on_one_device(change: Callable[[Tensor], Any], moved: bool) -> None:
    def run() -> Tensor:
        h = (square(requires_grad=True) if moved else torch.ones(2, 2, requires_grad=True)) * 1.0
        out = h.square().sum()
        change(h)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run().backward()
    with saving():
        out = run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_is_changed_in_place_and_then_kept_again_is_moved_again(moves: list[int]) -> None:
    x, ones = square(requires_grad=True), torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    with saving(x, ones):
        shift = torch.full_like(x, 3.0)
        spoiled = (ones * shift).sum()  # keeps it as it was
        shift.mul_(2)
        out = (x * shift).sum()
    assert len(moves) == 2
    assert torch.equal(torch.autograd.grad(out, x)[0], torch.full_like(x, 6.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spoiled.backward()


def test_what_recomputed_layers_are_called_with_waits_there_too() -> None:
    layer = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
    model = nn.Sequential(layer(), layer(), layer()).double()
    x, seen = square(), list[StorageWeakRef]()
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for block in model:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(StorageWeakRef(inputs[0].untyped_storage())))
    manner = Manner(recompute="full", offload="activations")
    Recomputed(model, manner, GlobalBatchNorm(model, None))  # type: ignore[arg-type]  # there is none
    for _ in range(2):  # the first time each layer is proved, by running it twice
        model.zero_grad()
        seen.clear()
        with saving(*model.parameters()):
            out = model(x).sum()
        assert [memory.expired() for memory in seen] == [False, True, True], "but for x"  # type: ignore[no-untyped-call]
        out.backward()
        found = [p.grad for p in model.parameters()]
        assert all(p is not None and torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def test_parts_of_one_memory_that_are_no_views_are_moved_apart(moves: list[int]) -> None:
    x = square(requires_grad=True)

    def run() -> Tensor:
        parts = (x * 1.0).unsafe_chunk(2, dim=1)  # as LSTM does: each has a count of changes of its own
        one, other = parts[0].sigmoid_(), parts[1].tanh_()
        return (one * other).sum()

    expected = torch.autograd.grad(run(), x)[0]
    with saving(x):
        out = run()
    assert moves == [x.nbytes // 2] * 2, "each once, and no more than itself"
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_backward_may_come_twice_and_be_derived_itself() -> None:
    x = square(requires_grad=True)
    with saving():
        out = (x * 1.0).exp().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    again = torch.autograd.grad(out, x, create_graph=True)[0]
    assert torch.equal(first, again)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], first)


def test_conjugates_broadcasts_and_odd_strides_come_back_as_they_were() -> None:
    x = torch.randn(WIDTH, WIDTH, dtype=torch.complex128, requires_grad=True)

    def run() -> Tensor:
        h = x * 1.0
        wide = h[:, :1].expand(WIDTH, WIDTH)
        return (h.conj() * h.t()[::2].repeat(2, 1) * wide * h.as_strided((WIDTH, WIDTH), (1, 1))).abs().sum()

    expected = torch.autograd.grad(run(), x)[0]
    with saving():
        out = run()
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


# -------------------------------------------------------------------------------------------------- gradients


def test_a_gradient_goes_where_its_parameter_is() -> None:
    gradient = torch.ones(2, 3)
    assert to_host(gradient, nn.Parameter(torch.ones(2, 3))) is gradient
    assert to_host(gradient, nn.Parameter(torch.ones(2, 3, device="meta"))).device.type == "meta"


# --------------------------------------------------------------------------------------------------- a layout


def memories(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1])
def test_what_trains_has_memory_of_its_own_from_which_forward_s_is_filled(
    monkeypatch: pytest.MonkeyPatch, zero: int, compute: torch.dtype
) -> None:
    monkeypatch.setattr(offload, "is_host", lambda device: False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    template, group = Template(model), Group(Rendezvous("", 1, 0, 1))
    try:
        applied = apply(template, Plan(zero=zero), group, Manner(compute, offload="optimizer"))
        applied.import_state(template.initial)
        optimizer = BoundOptimizer(lambda params: torch.optim.AdamW(list(params), lr=0.1), template, applied)
        places = applied.places
        there = memories(applied.module.parameters())
        trained = {name: place.local for name, place in places.items() if name != "0.bias"}
        assert not memories(trained.values()) & there
        if compute == torch.float32 and not zero:
            assert places["0.bias"].local is places["0.bias"].compute, "what is frozen has no update to wait for"
        applied.refresh()
        optimizer.step({name: torch.ones_like(local) for name, local in trained.items()})
        before = {name: places[name].compute.detach().clone() for name in trained}
        applied.updated()
        applied.refresh()
        for name, local in trained.items():
            assert not torch.equal(places[name].compute, before[name])
            assert torch.equal(places[name].compute, local.to(compute)), name
            assert optimizer.optimizer.state[local]["exp_avg"].device == local.device
        applied.teardown()
    finally:
        group.close()


def test_on_the_host_itself_nothing_has_two_memories(moves: list[int]) -> None:
    template, group, manner = Template(nn.Linear(3, 4)), Group(Rendezvous("", 1, 0, 1)), Manner(offload="all")
    try:
        applied = apply(template, Plan(), group, manner)
        assert all(place.local is place.compute for place in applied.places.values())
        assert "inactive" in applied.notes[0]
        with offload.Offloaded(applied.module, manner, CPU).saving():
            square(requires_grad=True).exp()
        assert not moves
        applied.teardown()
    finally:
        group.close()
