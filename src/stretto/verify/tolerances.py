"""How far a plan may be from one device, in each type of numbers.

Two right computations differ because sums are taken in another order. Such a difference is a small multiple of the
type's epsilon, whatever the type; a mistake's is a multiple of the numbers themselves. The bounds lie between.

float64 (epsilon 2.2e-16): on six kinds of model, six plans and two optimizers, right code stays under 4e-15 for
gradients, weights and state after five steps. The bounds of 1e-12 and 1e-11 leave room for deeper sums, and lie ten
orders of magnitude below what a wrong factor or a missing term does.

float32 (epsilon 1.2e-7, 2**29 times larger): the same multiples of epsilon are 5e-4 and 5e-3, and are the bounds;
right code measures up to 8e-6 for gradients and their norm. The threshold under which a gradient is taken for noise
grows with the square root of epsilon (1e-9 times 2**14.5): it has to stay above the gradients' rounding (3e-6 of the
largest) and far below the gradients. One thing no bound in float32 can promise: where an activation lies within
rounding of a kink (ReLU, a maximum), two right computations may take different sides of it, and one sample's gradient
then differs by itself. In float64 that is a hundred million times rarer, which is why it is the default.

bfloat16 and float16: masters and sums are float32, so until the first update two right computations agree as in
float32 (2e-6 measured), and are held to 1e-4: a sum that is rounded to bfloat16, or an update that is applied to the
copies, is off by 2e-3. Later a master that lies at the edge between two values of the low type may round to either in
right code, which moves one weight of a copy by an epsilon of that type (8e-3 and 1e-3), and gradients by up to as much:
8e-3 measured after six steps. The bounds allow a few of those; they find a missing term or a wrong factor, not a subtle
difference: float64 is for that. Of a model with BatchNorm one device takes the batch whole, so that its sums inside the
low type are others from the first step on, and activations at a kink fall to other sides (gradients 0.15 apart measured
in bfloat16, 0.04 in float16): it has the widest bounds. A plan with ``tp`` rounds each rank's part of a sum to the low
type before the parts are added up (in float32 on one host), which moves an activation by an epsilon from the first step
on: of four transformers over three plans and five steps gradients differ by up to 3e-2 in bfloat16, and 2e-3 in
float16, so the bounds that elsewhere hold after the first update hold at once. Convolutions are rounded once there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from stretto.verify.facts import ReferenceRecord


@dataclass(frozen=True)
class Tolerances:
    """Bounds on relative differences: largest difference of a kind over its largest magnitude on one device.

    Args:
        quiet: share of the largest gradient under which an element's gradient is rounding noise. Adam turns noise on a
            zero gradient into a full step, so such elements are left out of the comparison of weights and state.
    """

    loss: float
    gradient: float
    norm: float
    weight: float
    state: float
    quiet: float


FLOAT64: Final = Tolerances(loss=1e-12, gradient=1e-12, norm=1e-12, weight=1e-11, state=1e-11, quiet=1e-9)
FLOAT32: Final = Tolerances(loss=5e-4, gradient=5e-4, norm=5e-4, weight=5e-3, state=5e-3, quiet=2e-5)
FIRST_NARROW: Final = Tolerances(loss=1e-4, gradient=1e-4, norm=1e-4, weight=2e-4, state=2e-4, quiet=1e-4)
NARROW: Final = Tolerances(loss=1e-2, gradient=5e-2, norm=2e-2, weight=5e-2, state=5e-2, quiet=1e-4)
WIDEST: Final = Tolerances(loss=2e-2, gradient=3e-1, norm=5e-2, weight=5e-2, state=3e-1, quiet=1e-4)

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fp64": "float64",
        "fp32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "bf16-autocast": "bfloat16 by autocast",
    }
)
TOLERANCES: Final[Mapping[str, Tolerances]] = MappingProxyType(
    {
        "float64": FLOAT64,
        "float32": FLOAT32,
        "bfloat16": NARROW,
        "float16": NARROW,
        "bfloat16 by autocast": NARROW,
    }
)


def limits_of(record: ReferenceRecord, step: int) -> Tolerances:
    """The bounds of one step, by the type of one device's numbers; step 0 is before the first."""
    limits = TOLERANCES[record.dtype]
    if limits is not NARROW:
        return limits
    if record.batch_norms:
        return WIDEST
    if record.cut_inside:
        return NARROW
    updated = any(taken.weight and math.isfinite(taken.norm) for taken in record.steps[: max(step - 1, 0)])
    return NARROW if updated else FIRST_NARROW
