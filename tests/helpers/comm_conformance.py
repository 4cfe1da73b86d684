"""What every process group must do, whatever it runs on: random calls, checked against sums made by hand.

All members draw the same cases and the same numbers for every rank, so each knows what must come out. A group that says
it is exact must give, bit for bit, rank 0's numbers combined with rank 1's, then rank 2's and so on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
SIZES = (0, 1, 3, 100, 8191, 8193, 87_381, 131_072, 262_144, 262_145, 400_001)
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class Case:
    """One draw: a type, a size, and the group."""

    def __init__(self, group: Any, backend: str, number: int) -> None:
        self.draw = random.Random(number)
        self.number = number
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.exact = backend != "gloo"
        types = (*FLOATS, *WHOLE, torch.complex64, torch.bool)
        self.dtype = self.draw.choice(types if self.exact else types[:8])
        self.elements = self.draw.choice(SIZES[number // 11 % 2 * 6 :])  # every second round, one of the large
        self.drawn = 0

    def numbers(self, elements: int) -> list[torch.Tensor]:
        """Numbers for each rank, the same on all ranks: windows of one row of random ones."""
        generator = torch.Generator().manual_seed(self.number)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = torch.complex64 if self.dtype.is_complex else torch.float32
            row = torch.randn(elements + 1000, dtype=wide, generator=generator).to(self.dtype)
        else:
            top = 2 if self.dtype == torch.bool else 100
            row = torch.randint(0, top, (elements + 1000,), generator=generator).to(self.dtype)
        self.drawn += 1
        starts = [(self.drawn * 8 + rank) * 13 % 1000 for rank in range(self.size)]
        return [row[start : start + elements] for start in starts]

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy with the same elements, scattered in memory half of the time; Gloo gives wrong numbers for those."""
        if self.draw.random() < 0.5 or not self.exact:
            return flat.clone()
        return torch.stack([flat, flat], dim=1)[:, 1]

    def combined(self, parts: list[torch.Tensor], name: str) -> torch.Tensor:
        """The parts in rank order; bf16 and fp16 through float32."""
        low = self.dtype in (torch.bfloat16, torch.float16)
        total = parts[0].float() if low else parts[0].clone()
        for part in parts[1:]:
            total = COMBINE[name](total, part.float() if low else part)
        if name == "AVG":
            total /= self.size
        return total.to(self.dtype)

    def operation(self) -> str:
        """A reduction that the type has."""
        if self.dtype.is_complex or self.dtype == torch.bool:
            return "SUM"
        has_average = self.exact and self.dtype.is_floating_point
        return self.draw.choice([name for name in COMBINE if name != "AVG" or has_average])

    def differs(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether it is not what must come out."""
        if self.exact or not self.dtype.is_floating_point:
            return not torch.equal(found, expected)
        loose = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(self.dtype, 1e-5)
        return not torch.allclose(found.double(), expected.double(), rtol=loose, atol=loose)


def all_reduce(case: Case) -> bool:
    name, parts = case.operation(), case.numbers(case.elements)
    tensor = case.shaped(parts[case.rank])
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name), group=case.group)
    return case.differs(tensor, case.combined(parts, name))


def reduce(case: Case) -> bool:
    name, parts = case.operation(), case.numbers(case.elements)
    root = case.draw.randrange(case.size)
    tensor = case.shaped(parts[case.rank])
    dist.reduce(tensor, group_dst=root, op=getattr(dist.ReduceOp, name), group=case.group)
    return case.rank == root and case.differs(tensor, case.combined(parts, name))


def broadcast(case: Case) -> bool:
    parts = case.numbers(case.elements)
    root = case.draw.randrange(case.size)
    tensor = case.shaped(parts[case.rank])
    dist.broadcast(tensor, group_src=root, group=case.group)
    return case.differs(tensor, parts[root])


def all_gather(case: Case) -> bool:
    uneven = case.exact and case.draw.random() < 0.5
    sizes = [case.draw.choice(SIZES) if uneven else case.elements for _ in range(case.size)]
    parts = [case.numbers(size)[rank] for rank, size in enumerate(sizes)]
    outputs = [case.shaped(torch.zeros_like(part)) for part in parts]
    dist.all_gather(outputs, case.shaped(parts[case.rank]), group=case.group)
    return any(case.differs(found, part) for found, part in zip(outputs, parts, strict=True))


def all_gather_into(case: Case) -> bool:
    parts = case.numbers(case.elements)
    whole = torch.zeros(case.size * case.elements, dtype=case.dtype)
    dist.all_gather_into_tensor(whole, case.shaped(parts[case.rank]), group=case.group)
    return case.differs(whole, torch.cat(parts))


def gather_in_place(case: Case) -> bool:
    parts = case.numbers(case.elements)
    whole = torch.zeros(case.size, case.elements, dtype=case.dtype)
    whole[case.rank] = parts[case.rank]
    dist.all_gather_into_tensor(whole.view(-1), whole[case.rank], group=case.group)
    return case.differs(whole, torch.stack(parts))


def reduce_scatter(case: Case) -> bool:
    name = case.operation()
    uneven = case.exact and case.draw.random() < 0.5
    sizes = [case.draw.choice(SIZES) if uneven else case.elements for _ in range(case.size)]
    by_target = [case.numbers(size) for size in sizes]
    inputs = [case.shaped(parts[case.rank]) for parts in by_target]
    output = case.shaped(torch.zeros(sizes[case.rank], dtype=case.dtype))
    dist.reduce_scatter(output, inputs, op=getattr(dist.ReduceOp, name), group=case.group)
    return case.differs(output, case.combined(by_target[case.rank], name))


def reduce_scatter_tensor(case: Case) -> bool:
    name, wholes = case.operation(), case.numbers(case.elements * case.size)
    whole = wholes[case.rank].clone()
    output = torch.zeros(case.elements, dtype=case.dtype)
    if case.exact and case.draw.random() < 0.3:
        output = whole[case.rank * case.elements :][: case.elements]  # in place, as some callers do
    dist.reduce_scatter_tensor(output, whole, op=getattr(dist.ReduceOp, name), group=case.group)
    parts = [one[case.rank * case.elements :][: case.elements] for one in wholes]
    return case.differs(output, case.combined(parts, name))


def several(case: Case) -> bool:
    """Coalesced calls, and calls that are waited for in another order than they were made in."""
    first, second = case.numbers(case.elements), case.numbers(777)
    ours = [first[case.rank].clone(), second[case.rank].clone()]
    with dist._coalescing_manager(case.group):
        for tensor in ours:
            dist.all_reduce(tensor, group=case.group)
    wholes = [torch.zeros(case.size * parts[0].numel(), dtype=case.dtype) for parts in (first, second)]
    works = [
        dist.all_gather_into_tensor(whole, parts[case.rank], group=case.group, async_op=True)
        for whole, parts in zip(wholes, (first, second), strict=True)
    ]
    for work in reversed(works):
        work.wait()
    wrong = [
        case.differs(tensor, case.combined(parts, "SUM")) for tensor, parts in zip(ours, (first, second), strict=True)
    ]
    wrong += [case.differs(whole, torch.cat(parts)) for whole, parts in zip(wholes, (first, second), strict=True)]
    return any(wrong)


def scatter(case: Case) -> bool:
    parts, root = case.numbers(case.elements), case.draw.randrange(case.size)
    output = torch.zeros(case.elements, dtype=case.dtype)
    inputs = [case.shaped(part) for part in parts] if case.rank == root else None
    dist.scatter(output, inputs, group_src=root, group=case.group)
    return case.differs(output, parts[case.rank])


def all_to_all(case: Case) -> bool:
    wholes = case.numbers(case.elements * case.size)
    output = torch.zeros(case.elements * case.size, dtype=case.dtype)
    dist.all_to_all_single(output, wholes[case.rank].clone(), group=case.group)
    expected = torch.cat([one[case.rank * case.elements :][: case.elements] for one in wholes])
    return case.differs(output, expected)


KINDS = (all_reduce, reduce, broadcast, all_gather, all_gather_into, gather_in_place)
KINDS += (reduce_scatter, reduce_scatter_tensor, several, scatter, all_to_all)


def conformance(group: Any, backend: str, cases: int) -> list[str]:
    """Runs ``cases`` draws of each kind; describes those that came out wrong. Every member must call it."""
    wrong = []
    for number in range(cases * len(KINDS)):
        case, kind = Case(group, backend, number), KINDS[number % len(KINDS)]
        if kind(case):
            wrong.append(f"case {number}: {kind.__name__} of {case.elements} {case.dtype} on rank {case.rank}")
        if number % 7 == 0:
            dist.barrier(group)
    return wrong
