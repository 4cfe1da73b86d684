"""Convolutional networks cut by channels: each rank a thread here, together they give what the whole model gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretches import cut_at
from stretto.errors import Refused
from stretto.graph.cut import Cut, follow_cut, plan_cut, report
from stretto.graph.localize import DROP, ENTER, LEAVE, NORM, Localizer
from stretto.graph.rules import read
from stretto.graph.stages import work_of
from stretto.graph.trace import Traced, trace
from stretto.parallel.batchnorm import GlobalBatchNorm, NormOfAll
from stretto.parallel.messages import Drop, Enter, Leave
from stretto.state import Part


class Thread:
    """As much of a group as a cut layer asks for, among threads."""

    def __init__(self, rank: int, size: int, meet: threading.Barrier, shelf: dict[int, Tensor]) -> None:
        self.rank, self.size, self._meet, self._shelf = rank, size, meet, shelf

    def all_reduce(self, tensor: Tensor) -> None:
        self._shelf[self.rank] = tensor.clone()
        self._meet.wait(20)
        tensor.copy_(torch.stack([self._shelf[rank] for rank in range(self.size)]).sum(0))
        self._meet.wait(20)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._shelf[self.rank] = tensor.clone()
        self._meet.wait(20)
        found = [self._shelf[rank] for rank in range(self.size)]
        self._meet.wait(20)
        return found


def threads(size: int) -> list[Thread]:
    meet, shelf = threading.Barrier(size), dict[int, Tensor]()
    return [Thread(rank, size, meet, shelf) for rank in range(size)]


def taken(whole: Tensor, part: Part) -> Tensor:
    return torch.cat([whole[tuple(map(slice, box.starts, box.stops))] for box in part.boxes], part.dim)


def one_rank(
    model: nn.Module, traced: Traced, cut: Cut, group: Thread, x: Tensor
) -> tuple[Tensor, dict[str, tuple[Part, Tensor]]]:
    """The output, and this rank's part of each gradient and of each buffer as it is then."""
    localizer = Localizer(
        cut_at(work_of(traced, dict.fromkeys(traced.parameters.values(), True)), ()), cut, group.rank
    )
    (alone,) = threads(1)
    norm = NormOfAll(GlobalBatchNorm(nn.Module(), alone))  # type: ignore[arg-type]
    modules = {ENTER: Enter(group), LEAVE: Leave(group), DROP: Drop(), NORM: norm}  # type: ignore[arg-type]
    portion = localizer.build(0, modules)
    named, held, bound = {**traced.parameters, **traced.buffers}, dict[str, tuple[Part, Tensor]](), list[Tensor]()
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    nodes = {node.name: node for node in traced.graph.graph.nodes}
    for name in portion.bound:
        if name in named:
            part = cut.part(cut.reading.of(nodes[name]), group.rank)
            value = whole[named[name]].detach().clone()
            value = taken(value, part) if value.dim() else value
            held[named[name]] = part, value.requires_grad_(name in traced.parameters)
        bound.append(held[named[name]][1] if name in named else x)
    (output,) = portion.graph(*bound)
    if output.requires_grad:
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return output, {name: (part, value if value.grad is None else value.grad) for name, (part, value) in held.items()}


class Mobile(nn.Module):
    """An inverted bottleneck: pointwise, depthwise, pointwise, beside what came in, which squeezes and excites."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_norm = nn.Conv2d(3, 7, 1, bias=False), nn.BatchNorm2d(7)
        self.depth, self.depth_norm = nn.Conv2d(7, 14, 3, padding="same", groups=7), nn.BatchNorm2d(14)
        self.squeeze, self.excite = nn.Conv2d(14, 4, 1), nn.Conv2d(4, 14, 1)
        self.down = nn.Conv2d(14, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.hardswish(self.depth_norm(self.depth(F.relu6(self.up_norm(self.up(x))))))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(hidden, 1)))))
        out: Tensor = x + self.down(hidden * gate)
        return out


class First(nn.Module):
    """The first of what one module gives, through another."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)[0])  # type: ignore[no-any-return]


def up() -> nn.Module:
    """What a decoder has."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, padding_mode="circular"),
        *(nn.GroupNorm(5, 10), nn.PReLU(10), nn.Conv2d(10, 4, 1), nn.GroupNorm(1, 4), nn.ConvTranspose2d(4, 6, 2, 2)),
        *(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.Upsample(scale_factor=2, mode="bilinear")),
        *(nn.ReflectionPad2d(1), nn.Conv2d(6, 2, 3), nn.PReLU()),
    )


def pixels() -> nn.Module:
    """Channels become space, and space channels."""
    between = nn.PixelShuffle(2), nn.BatchNorm2d(5), nn.MaxPool2d(2, return_indices=True)
    first, last = nn.Sequential(nn.Conv2d(3, 20, 1), *between), nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(20, 2, 1))
    return First(first, last)


def head() -> nn.Module:
    """Channels times space are the features of a linear layer."""
    first = nn.BatchNorm2d(6, affine=False), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), *first, nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4)
    )


def line() -> nn.Module:
    """One dimension of space, groups of several channels, forward and transposed."""
    return nn.Sequential(
        *(nn.Unflatten(2, (36,)), nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 12, 3, groups=4), nn.ReLU()),
        *(nn.ConvTranspose1d(12, 8, 3, groups=4), nn.GroupNorm(4, 8, affine=False), nn.AdaptiveMaxPool1d(3)),
        *(nn.Upsample(size=5), nn.Conv1d(8, 2, 1)),
    )


# What is cut in them, along axes of which sizes.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[int]]] = {
    "mobile": (Mobile, (3, 3, 6, 6), {7}),
    "up": (up, (3, 3, 6, 6), {5, 6}),
    "pixels": (pixels, (3, 3, 4, 4), {5}),
    "head": (head, (3, 3, 8, 8), {6}),
    "line": (line, (3, 3, 36), {4}),
}


def parts(traced: Traced, cut: Cut, rank: int) -> dict[str, Part]:
    names = {**traced.parameters, **traced.buffers}
    return {names[n.name]: cut.part(cut.reading.of(n), rank) for n in traced.graph.graph.nodes if n.name in names}


def compared(model: nn.Module, traced: Traced, cuts: list[Cut], x: Tensor) -> None:
    """All ranks' outputs, parts of gradients and of buffers are those of the model itself."""
    group = threads(len(cuts))
    with ThreadPoolExecutor(len(cuts)) as pool:
        jobs = [pool.submit(one_rank, model, traced, cut, one, x) for cut, one in zip(cuts, group, strict=True)]
        found = [job.result() for job in jobs]
    output = model(x)
    model.zero_grad()
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    whole = {**{n: p.grad for n, p in model.named_parameters()}, **dict(model.named_buffers())}
    for given, held in found:
        torch.testing.assert_close(given, output, rtol=1e-12, atol=1e-12)
        assert set(held) == set(whole) - {n for n in whole if n.endswith("num_batches_tracked") and n not in held}
        for name, (part, value) in held.items():
            expected: Any = whole[name]
            torch.testing.assert_close(
                value, taken(expected, part) if expected.dim() else expected, rtol=1e-10, atol=1e-11
            )


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("name", NETS)
def test_parts_of_a_convolutional_network_make_the_whole(name: str, degree: int) -> None:
    """In training, and then in evaluation with the weights and running statistics that are held by then."""
    build, shape, axes = NETS[name]
    torch.manual_seed(3)
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    traced = trace(model, (x,), {})
    cut = plan_cut(read(traced), traced, degree)
    assert {axis.size for axis in cut.axes} == axes, report(cut, traced)
    assert any(part.cut for one, part in parts(traced, cut, 0).items() if one in traced.buffers.values())
    compared(model, traced, [cut] * degree, x)
    evaluated = trace(model.eval(), (x,), {})
    compared(
        model,
        evaluated,
        [follow_cut(read(evaluated), evaluated, parts(traced, cut, r), degree) for r in range(degree)],
        x,
    )


def drawn(then: nn.Module, channels: int = 1) -> nn.Module:
    """Space that a linear layer has made, so that nothing else needs it whole."""
    return nn.Sequential(
        nn.Linear(3, 16 * channels), nn.Unflatten(1, (channels, 4, 4)), then, nn.Flatten(), nn.LazyLinear(2)
    )


WHOLE = {
    "one group": (nn.GroupNorm(1, 6), "a group norm runs over it"),
    "pool": (nn.AvgPool2d(2), "avg_pool2d runs over it"),
    "upsampling": (nn.Upsample(scale_factor=2), "upsample_nearest2d runs over it"),
    "padding": (nn.ZeroPad2d(1), "padding is laid beside it"),
    "convolution": (nn.Conv2d(1, 2, 3), "a convolution runs over it"),
    "transposed": (nn.ConvTranspose2d(1, 2, 2), "a convolution runs over it"),
    "batch norm": (nn.BatchNorm2d(1), "batch_norm runs over it"),
    "instance norm": (nn.InstanceNorm2d(1), "instance_norm runs over it"),
    "pixels": (nn.PixelUnshuffle(2), "pixels are shuffled over it"),
    "channels dropped": (nn.Dropout2d(0.5), "channels are dropped as a whole"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_space_and_what_a_group_norm_looks_at_together_are_needed_whole(name: str) -> None:
    then, says = WHOLE[name]
    model, x = drawn(then, 6 if name == "one group" else 1), torch.randn(4, 3)
    model(x)
    traced = trace(model, (x,), {})
    cut = plan_cut(read(traced), traced, 2)
    said = report(cut, traced)["0.weight"]
    assert said.startswith("whole") and says in said


class Changing(nn.Module):
    """In training or in evaluation it looks at all of something that a channel has its own of."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.trains, self.scale = trains, nn.Parameter(torch.ones(6, 1, 1))
        self.into, self.norm, self.out = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.scale if self.trains else self.norm.running_mean
        assert whole is not None
        if self.training == self.trains:
            return self.out(self.norm(self.into(x))) + whole.softmax(0).amax()  # type: ignore[no-any-return]
        return self.out(self.norm(self.into(x)) * self.scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("trains", "says"),
    [(False, "tp cuts into.weight, but .* it is in the model's input, or in a buffer"), (True, "tp keeps scale whole")],
)
def test_what_evaluation_needs_otherwise_than_training_has_it_is_refused(trains: bool, says: str) -> None:
    model, x = Changing(trains), torch.randn(2, 3, 4, 4)
    traced = trace(model, (x,), {})
    cut = plan_cut(read(traced), traced, 2)
    evaluated = trace(model.eval(), (x,), {})
    with pytest.raises(Refused, match=says):
        follow_cut(read(evaluated), evaluated, parts(traced, cut, 0), 2)
